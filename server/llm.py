"""The offline API: the same engine without a server, for scripts and batch jobs."""

import asyncio
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from rich.console import Console
from rich.progress import Progress

from server.compose import build_core
from server.config import Config
from server.engine.protocol import (
    Delta,
    Finished,
    PositionLogprobs,
    PromptLogprobs,
    SpeculationStats,
    Started,
    StreamEvent,
    Timing,
)
from server.errors import EngineDead, InvalidRequest
from server.preprocess import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from server.request import Request, SamplingParams, SpeculationOptions

_Result = TypeVar("_Result")
PromptLike = str | Mapping[str, Any]
"""Text, or {"prompt": text}, or {"prompt_token_ids": ids}."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages {"role": text, "content": text}, oldest first."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice: its text and tokens, and why it ended ("stop", "length" or "abort")."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    timing: Timing = field(default_factory=Timing)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its choices; `num_cached_tokens` counts prompt tokens found in the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)


class LLM:
    """A model in this process. Takes every setting of `outrider serve` by name.

    `speculative_config=None` turns speculation off; left out, the default holds. Use it as a
    context manager, or call `close`. One thread at a time may call it.
    """

    def __init__(self, model: str = "smollm2-135m", **settings: Any) -> None:
        """Load the model. Raises: ConfigError, ModelError."""
        config = Config.from_kwargs(model=model, **settings)
        core = build_core(config)
        self._engine, self._preprocessor = core.engine, core.preprocessor
        self._max_queued = config.scheduler.max_queued_requests
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-loop", daemon=True)
        self._thread.start()
        try:
            self._run(self._engine.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine; idempotent."""
        if self._loop.is_closed():
            return
        self._run(self._engine.stop())
        self._run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        speculation: SpeculationOptions = SpeculationOptions(),
    ) -> list[RequestOutput]:
        """Generate for all prompts in one batch; the outputs are in the prompts' order.

        Args:
            sampling_params: one for all prompts, or one for each.
            use_tqdm: show a progress bar, on a terminal.
        Raises: InvalidRequest before anything runs; RequestFailed if a request breaks; EngineDead after close().
        """
        given: object = prompts
        if not isinstance(given, Iterable) or isinstance(given, bytes):
            raise InvalidRequest.of("prompts", f"must be a prompt, or a list of them, got {prompts!r}")
        listed: list[PromptLike] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        return self._answer([_to_prompt(prompt) for prompt in listed], sampling_params, use_tqdm, speculation)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        speculation: SpeculationOptions = SpeculationOptions(),
    ) -> list[RequestOutput]:
        """Answer one conversation, or several in one batch, by the model's chat template; the outputs have no `prompt`.

        Args: as of `generate`. Raises: as `generate`; InvalidRequest, too, if the model has no chat template.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Conversation]", [messages] if is_one else messages)
        prompts = [_to_chat_prompt(conversation) for conversation in conversations]
        return self._answer(prompts, sampling_params, use_tqdm, speculation)

    def _answer(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        speculation: SpeculationOptions,
    ) -> list[RequestOutput]:
        if self._loop.is_closed():
            raise EngineDead("this LLM was closed")
        if not isinstance(speculation, SpeculationOptions):
            raise InvalidRequest.of("speculation", f"must be a SpeculationOptions, got {speculation!r}")
        requests = [
            self._preprocessor.build(
                prompt,
                params,
                request_id=uuid.uuid4().hex,
                speculation=speculation,
                arrival_s=self._engine.now(),
            )
            for prompt, params in zip(prompts, _spread(sampling_params, len(prompts)), strict=True)
        ]
        outputs = [
            RequestOutput(
                request.request_id,
                prompt.text if isinstance(prompt, TextPrompt) else None,
                list(request.prompt_token_ids),
                [CompletionOutput(index) for index in range(request.sampling.n)],
            )
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not (use_tqdm and console.is_terminal)) as progress:
            bar = progress.add_task("generating", total=len(requests))
            self._run(self._generate_all(requests, outputs, lambda: progress.advance(bar)))
        return outputs

    async def _generate_all(
        self, requests: Sequence[Request], outputs: Sequence[RequestOutput], on_done: Callable[[], None]
    ) -> None:
        gate = asyncio.Semaphore(self._max_queued)

        async def generate(request: Request, output: RequestOutput) -> None:
            async with gate:
                stream = self._engine.open(request.request_id)
                try:
                    self._engine.submit(stream, request)
                    async for event in stream:
                        _take_in(output, event)
                finally:
                    self._engine.abort(request.request_id)
            on_done()

        tasks = [asyncio.create_task(generate(*pair)) for pair in zip(requests, outputs, strict=True)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # where the caller was interrupted, the work would go on


def _spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, Mapping) or not all(isinstance(each, SamplingParams) for each in params):
        raise InvalidRequest.of("sampling_params", f"must be a SamplingParams, or a list of them, got {params!r}")
    if len(params) != count:
        raise InvalidRequest.of("sampling_params", f"must be one, or one for each of the {count} prompts")
    return list(params)


def _to_prompt(prompt: object) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if isinstance(prompt, Mapping) and (token_ids := prompt.get("prompt_token_ids")) is not None:
        if isinstance(token_ids, Iterable):
            listed = list(token_ids)
            if all(isinstance(token_id, Integral) for token_id in listed):
                return TokensPrompt(listed)
        raise InvalidRequest.of("prompts", f"prompt_token_ids must be a list of integers, got {token_ids!r}")
    if isinstance(prompt, Mapping) and isinstance(text := prompt.get("prompt"), str):
        return TextPrompt(text)
    raise InvalidRequest.of(
        "prompts", f"must each be text, or a mapping with 'prompt' or 'prompt_token_ids', got {prompt!r}"
    )


def _to_chat_prompt(conversation: Conversation) -> ChatPrompt:
    pairs: list[tuple[str, str]] = []
    for place, message in enumerate(conversation):
        if not isinstance(cast("object", message), Mapping) or set(message) != {"role", "content"}:
            raise InvalidRequest.of(f"messages[{place}]", f"must have role and content alone, got {message!r}")
        for name, text in message.items():
            if not isinstance(text, str):
                raise InvalidRequest.of(f"messages[{place}].{name}", f"must be text, got {text!r}")
        pairs.append((message["role"], message["content"]))
    return ChatPrompt(pairs)


def _take_in(output: RequestOutput, event: StreamEvent) -> None:
    match event:
        case Started():
            output.num_cached_tokens = event.num_cached_tokens
        case PromptLogprobs():
            output.prompt_logprobs += event.positions
        case Delta():
            choice = output.outputs[event.index]
            choice.text += event.text
            choice.token_ids += event.token_ids
            choice.logprobs += event.logprobs
        case Finished():
            choice = output.outputs[event.index]
            choice.finish_reason = event.finish_reason.value
            choice.stop_reason = event.stop_reason
            choice.timing, choice.speculation = event.timing, event.speculation
