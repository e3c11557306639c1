"""The asyncio client.

async with AsyncClient("127.0.0.1:50051") as client:
    async for delta in client.generate("Once upon a time", max_tokens=32):
        print(delta.text, end="")
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from clients.async_stream import AsyncStream, Call, uncancelled
from clients.channel import (
    CHANNEL_OPTIONS,
    HEALTH_REQUEST,
    HEALTH_SERVING,
    HEALTH_WATCH,
    NO_ANSWER,
    NOT_SERVING,
    Deadline,
    not_ready,
)
from clients.errors import DeadlineExceededError, OutriderClientError, UnavailableError
from clients.metadata import Metadata, checked_metadata
from clients.outputs import Delta, Event, OutputBuilder
from clients.requests import (
    GenerateOptions,
    Message,
    abort_request,
    detokenize_request,
    generate_request,
    tokenize_request,
)
from clients.retry import DEFAULT_RETRY, RetryPolicy
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1.inference_pb2_grpc import InferenceStub


class AsyncGeneration(AsyncStream):
    """One generation of one server."""

    def __init__(self, open_call: Callable[[float | None], Call], retry: RetryPolicy, timeout_s: float | None) -> None:
        super().__init__()
        self._open_call = open_call
        self._retry = retry
        self._deadline = Deadline(timeout_s)
        self._has_tokens = False
        self._num_attempts = 1
        self._call = open_call(self._deadline.remaining_s())

    def cancel(self) -> None:
        """End the call if it is live."""
        self._call.cancel()

    async def _read(self) -> Event | None:
        """The next event, None at the end; begins anew where that is safe and of use."""
        while True:
            try:
                message = await uncancelled(self._call.read())
            except OutriderClientError as error:
                pause_s = self._retry.pause_s(error, self._num_attempts, self._deadline.remaining_s())
                if self._has_tokens or pause_s is None:
                    raise
                await asyncio.sleep(pause_s)
                self._begin_anew()
                continue
            if not isinstance(message, pb.GenerateResponse):
                return None
            if (event := self._builder.add(message)) is not None:
                self._has_tokens |= isinstance(event, Delta)
                return event

    def _begin_anew(self) -> None:
        self._num_attempts += 1
        self._builder = OutputBuilder()
        self._call = self._open_call(self._deadline.remaining_s())


class AsyncClient:
    """A client of one server; lives on one event loop, shared by any number of tasks.

    `target` is HOST:PORT or unix:PATH. Methods raise OutriderClientError. `timeout_s` bounds
    a call with all its retries; None waits for ever.
    """

    def __init__(self, target: str, *, retry: RetryPolicy = DEFAULT_RETRY) -> None:
        self._target = target
        self._retry = retry
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._stub = InferenceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is live and disconnect."""
        await self._channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> AsyncGeneration:
        """Begin a generation from text, `token_ids` or `messages`.

        Args:
            metadata: sent along, such as a W3C traceparent.
        Raises: InvalidRequestError for what the wire cannot carry.
        """
        request, headers = generate_request(prompt, options), checked_metadata(metadata)

        def open_call(remaining_s: float | None) -> Call:
            call: Call = self._stub.Generate(request, timeout=remaining_s, metadata=headers)
            return call

        return AsyncGeneration(open_call, self._retry, timeout_s)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Iterable[Message] | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """The token ids of a text or a conversation, as a generation would have them."""
        request = tokenize_request(text, messages, add_special_tokens)
        response: pb.TokenizeResponse = await self._unary(self._stub.Tokenize, request, timeout_s)
        return list(response.token_ids)

    async def detokenize(
        self, token_ids: Iterable[int], *, skip_special_tokens: bool | None = None, timeout_s: float | None = None
    ) -> str:
        """The text of some token ids."""
        request = detokenize_request(token_ids, skip_special_tokens)
        response: pb.DetokenizeResponse = await self._unary(self._stub.Detokenize, request, timeout_s)
        return response.text

    async def abort(self, *request_ids: str, timeout_s: float | None = None) -> dict[str, bool]:
        """End requests early; says per id whether it was live."""
        request = abort_request(request_ids)
        response: pb.AbortResponse = await self._unary(self._stub.Abort, request, timeout_s)
        return {result.request_id: result.found for result in response.results}

    async def model_info(self, *, timeout_s: float | None = None) -> pb.GetModelInfoResponse:
        """The loaded model and its limits."""
        response: pb.GetModelInfoResponse = await self._unary(
            self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout_s
        )
        return response

    async def stats(self, *, timeout_s: float | None = None) -> pb.GetStatsResponse:
        """A snapshot of the server."""
        response: pb.GetStatsResponse = await self._unary(self._stub.GetStats, pb.GetStatsRequest(), timeout_s)
        return response

    async def wait_ready(self, *, timeout_s: float | None = None) -> None:
        """Wait until a server answers there and reports SERVING. Raises: DeadlineExceededError, which says why not."""
        deadline, last = Deadline(timeout_s), NO_ANSWER
        watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(HEALTH_WATCH)
        while True:
            call = watch(HEALTH_REQUEST, timeout=deadline.remaining_s())  # fails fast, so says why
            try:
                while (answer := await uncancelled(call.read())) is not grpc.aio.EOF:
                    if answer == HEALTH_SERVING:
                        return
                    last = NOT_SERVING
            except DeadlineExceededError as error:
                raise not_ready(self._target, timeout_s, last) from error
            except UnavailableError as error:
                last = str(error)
            finally:
                call.cancel()
            await asyncio.sleep(self._retry.initial_backoff_s)

    async def _unary(self, method: Callable[..., Awaitable[Any]], request: object, timeout_s: float | None) -> Any:
        deadline = Deadline(timeout_s)
        num_attempts = 1
        while True:
            try:
                return await uncancelled(method(request, timeout=deadline.remaining_s()))
            except OutriderClientError as error:
                pause_s = self._retry.pause_s(error, num_attempts, deadline.remaining_s())
                if pause_s is None:
                    raise
                await asyncio.sleep(pause_s)
                num_attempts += 1
