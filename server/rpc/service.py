"""The servicer: the only door from gRPC to the engine."""
# ruff: noqa: N802 - the stubs name the methods

import asyncio
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import grpc

from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1.inference_pb2_grpc import InferenceServicer
from server.engine.protocol import Delta, Engine, Finished, PromptLogprobs, RequestStream, Started, StreamEvent
from server.errors import DuplicateRequest, InvalidRequest
from server.events import EventBus, TokensStreamed
from server.kv_transfer_config import Role
from server.preprocess import Preprocessor, TokensPrompt, check_request_id
from server.request import Request, SamplingParams
from server.rpc.call import CallRecord, recorded_call
from server.rpc.convert import (
    continuation_from_proto,
    prompt_from_proto,
    sampling_from_proto,
    speculation_from_proto,
)
from server.rpc.responses import (
    delta_to_proto,
    finished_to_proto,
    model_info_to_proto,
    positions_per_message,
    prompt_logprobs_to_proto,
    started_to_proto,
    statistics_to_proto,
)
from server.rpc.roles import hands_on
from server.version import VERSION

Context = grpc.aio.ServicerContext[Any, Any]
_Result = TypeVar("_Result")
MAX_ABORTED_IDS = 10_000
"""In one call: they are ended in one go, on the event loop."""


class InferenceService(InferenceServicer):
    """Answers the calls of outrider.v1.Inference, on the event loop that owns the engine's streams.

    Handlers are coroutines that write, not generators: a cancelled generator is closed only
    when it is collected, and its request would run on until then.
    """

    def __init__(
        self,
        engine: Engine,
        preprocessor: Preprocessor,
        pool: Executor,
        grammar_pool: Executor,
        events: EventBus,
        *,
        max_message_bytes: int,
        role: Role = "both",
    ) -> None:
        """Args:
        pool: runs what may block; its threads bound how much of that there is at a time.
        grammar_pool: the same for requests with grammars, which may take a second, and must not hold up the others.
        """
        self._engine = engine
        self._preprocessor = preprocessor
        self._pool = pool
        self._grammar_pool = grammar_pool
        self._events = events
        self._role = role
        self._max_positions = positions_per_message(max_message_bytes)
        self._live_ids: set[str] = set()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Reserve the id, tokenise in the pool, stream; the request ends with the call, whatever ends it."""
        async with recorded_call("Generate", context, self._events) as record:
            arrival_s = self._engine.now()
            # Its stub forgets that a call may have no deadline.
            remaining_s = cast("float | None", context.time_remaining())
            deadline_s = None if remaining_s is None else arrival_s + remaining_s
            request_id = request.request_id if request.HasField("request_id") else str(uuid.uuid4())
            check_request_id(request_id)
            record.request_id = request_id
            is_handed_on = hands_on(request, self._role)
            with self._reserved(request_id):
                stream = self._engine.open(request_id, deadline_s=deadline_s)
                try:
                    await self._stream(stream, request, is_handed_on, arrival_s, deadline_s, context, record)
                except BaseException:
                    if is_handed_on:  # whoever left does not know what was handed on
                        self._engine.release(request_id)
                    raise
                finally:
                    self._engine.abort(request_id)
                    record.choices = tuple(stream.finished)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """The ids of a prompt, as Generate would make them."""
        async with recorded_call("Tokenize", context, self._events):
            token_ids = await self._in_pool(lambda: self._tokenize(request))
            return pb.TokenizeResponse(token_ids=token_ids, max_model_len=self._preprocessor.model_info.max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """The text of some ids."""
        async with recorded_call("Detokenize", context, self._events):
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            text = await self._in_pool(
                lambda: self._preprocessor.detokenize(request.token_ids, skip_special_tokens=skip)
            )
            return pb.DetokenizeResponse(text=text)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End requests; those already over are reported as not found."""
        async with recorded_call("Abort", context, self._events):
            if len(request.request_ids) > MAX_ABORTED_IDS:
                raise InvalidRequest.of(
                    "request_ids", f"at most {MAX_ABORTED_IDS} in a call, got {len(request.request_ids)}"
                )
            return pb.AbortResponse(results=[self._abort(request_id) for request_id in request.request_ids])

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """The loaded model and its limits."""
        async with recorded_call("GetModelInfo", context, self._events):
            return model_info_to_proto(
                self._engine.model_info, has_chat_template=self._preprocessor.has_chat_template, version=VERSION
            )

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        """A snapshot of the engine."""
        async with recorded_call("GetStats", context, self._events):
            return statistics_to_proto(self._engine.statistics())

    def _abort(self, request_id: str) -> pb.AbortResult:
        is_live = self._engine.abort(request_id)
        if not is_live:
            self._engine.release(request_id)
        return pb.AbortResult(request_id=request_id, found=is_live)

    @contextmanager
    def _reserved(self, request_id: str) -> Iterator[None]:
        """Keep the id until its call is over.

        The engine frees it with the last token, while a slow client still reads: the abort at the
        end of such a call must not meet a newer request of the same id.
        """
        if request_id in self._live_ids:
            raise DuplicateRequest(request_id)
        self._live_ids.add(request_id)
        try:
            yield
        finally:
            self._live_ids.remove(request_id)

    async def _stream(
        self,
        stream: RequestStream,
        message: pb.GenerateRequest,
        is_handed_on: bool,
        arrival_s: float,
        deadline_s: float | None,
        context: Context,
        record: CallRecord,
    ) -> None:
        """Submit once tokenised, and write events meanwhile: an abort may come before the first token id."""

        async def prepare() -> None:
            request = await self._in_pool(
                lambda: self._build(message, stream.request_id, is_handed_on, arrival_s, deadline_s),
                self._pool if message.sampling.WhichOneof("constraint") is None else self._grammar_pool,
            )
            record.num_prompt_tokens = len(request.prompt_token_ids)
            record.attributes = _request_attributes(request.sampling)
            self._engine.submit(stream, request)

        last_sent_s: dict[int, float] = {}
        try:
            async with asyncio.TaskGroup() as tasks:
                preparing = tasks.create_task(prepare())
                async for event in stream:
                    await self._write(event, context, record, last_sent_s)
                preparing.cancel()
        except ExceptionGroup as group:
            # Either tokenising or the stream failed; the group only says so in plural.
            error = group.exceptions[0]
            raise error from error.__cause__

    async def _write(
        self, event: StreamEvent, context: Context, record: CallRecord, last_sent_s: dict[int, float]
    ) -> None:
        token_text = self._preprocessor.token_text
        match event:
            case Started():
                await context.write(started_to_proto(event))
            case PromptLogprobs():
                messages = prompt_logprobs_to_proto(event, token_text, self._max_positions)
                while (response := await self._in_pool(lambda: next(messages, None))) is not None:
                    await context.write(response)
            case Delta():
                record.add_delta(event)
                self._publish_tokens(event, record.request_id, last_sent_s)
                for response in delta_to_proto(event, token_text, self._max_positions):
                    await context.write(response)
            case Finished():
                await context.write(finished_to_proto(event))

    def _publish_tokens(self, delta: Delta, request_id: str, last_sent_s: dict[int, float]) -> None:
        if not delta.token_ids:
            return
        now_s = self._engine.now()
        previous_s = last_sent_s.get(delta.index)
        last_sent_s[delta.index] = now_s
        self._events.publish(
            TokensStreamed(
                request_id=request_id,
                index=delta.index,
                num_tokens=len(delta.token_ids),
                gap_s=None if previous_s is None else now_s - previous_s,
            )
        )

    def _build(
        self,
        message: pb.GenerateRequest,
        request_id: str,
        is_handed_on: bool,
        arrival_s: float,
        deadline_s: float | None,
    ) -> Request:
        return self._preprocessor.build(
            prompt_from_proto(message),
            sampling_from_proto(message.sampling, self._preprocessor.model_info.generation_defaults),
            request_id=request_id,
            speculation=speculation_from_proto(message.speculation),
            priority=message.priority,
            cache_salt=message.cache_salt,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            hands_on=is_handed_on,
            continuation=continuation_from_proto(message),
        )

    def _tokenize(self, request: pb.TokenizeRequest) -> list[int]:
        prompt = prompt_from_proto(request)
        assert not isinstance(prompt, TokensPrompt), "TokenizeRequest takes no ids"
        if request.WhichOneof("prompt") == "chat" and request.HasField("add_special_tokens"):
            raise InvalidRequest.of("add_special_tokens", "must not be set with chat: the template brings its own")
        add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return self._preprocessor.tokenize(prompt, add_special_tokens=add_special_tokens)

    async def _in_pool(self, call: Callable[[], _Result], pool: Executor | None = None) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(pool or self._pool, call)


def _request_attributes(sampling: SamplingParams) -> dict[str, str | int | float | bool]:
    """What the caller asked for, defaults resolved, in the names of the GenAI conventions."""
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.choice.count": sampling.n,
    }
    if sampling.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
    if sampling.seed is not None:
        attributes["gen_ai.request.seed"] = sampling.seed
    return attributes
