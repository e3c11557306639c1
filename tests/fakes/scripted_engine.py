"""An engine that follows a script instead of a model: for what a model cannot be made to do."""

import asyncio
from collections.abc import AsyncIterator, Callable

from server.engine.protocol import (
    Delta,
    EngineStatistics,
    Finished,
    FinishReason,
    RequestStream,
    SpeculationStats,
    Started,
    StreamEvent,
    Timing,
)
from server.errors import DeadlineExceeded, DuplicateRequest, Overloaded
from server.request import ModelInfo, Request
from server.speculation_state import SpeculationChange, SpeculationState

Script = Callable[[Request], AsyncIterator[StreamEvent]]


def finished(request: Request, num_tokens: int, index: int = 0, reason: FinishReason = FinishReason.LENGTH) -> Finished:
    """The end of one choice."""
    return Finished(
        index=index,
        finish_reason=reason,
        stop_reason=None,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_completion_tokens=num_tokens,
        num_cached_tokens=0,
        timing=Timing(),
        speculation=SpeculationStats(),
    )


async def echo(request: Request) -> AsyncIterator[StreamEvent]:
    """Repeat the prompt's ids as text, "<id>" by "<id>", until max_tokens; choices take turns."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    assert sampling.max_tokens is not None
    yield Started(request.request_id, len(prompt), 0)
    for i in range(sampling.max_tokens):
        token_id = prompt[i % len(prompt)]
        for index in range(sampling.n):
            yield Delta(index, f"<{token_id}>", (token_id,))
        await asyncio.sleep(0)
    for index in range(sampling.n):
        yield finished(request, sampling.max_tokens, index)


class ScriptedStream:
    """The events of one request, in a queue."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self.finished: list[Finished] = []
        self.queue: asyncio.Queue[StreamEvent | Exception | None] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def request_id(self) -> str:
        """The id it was opened with."""
        return self._request_id

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        while (item := await self.queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            if isinstance(item, Finished):
                self.finished.append(item)
            yield item


class ScriptedEngine:
    """Plays `script` for every request; remembers what the front did. Speculation changes, and does nothing."""

    def __init__(
        self,
        model_info: ModelInfo,
        script: Script = echo,
        *,
        max_live: int = 1000,
        speculation: SpeculationState | None = None,
    ) -> None:
        self._model_info = model_info
        self.script = script
        self.max_live = max_live
        self.speculation = speculation or SpeculationState.of(None, ())
        self.live: dict[str, ScriptedStream] = {}
        self.submitted: list[Request] = []
        self.abort_calls: list[str] = []
        self.released: list[str] = []

    @property
    def model_info(self) -> ModelInfo:
        """As given."""
        return self._model_info

    async def set_speculation(self, change: SpeculationChange) -> SpeculationState:
        """At once."""
        self.speculation = self.speculation.changed(change)
        return self.speculation

    def open(self, request_id: str, *, deadline_s: float | None = None) -> ScriptedStream:
        """Reserve the id."""
        if request_id in self.live:
            raise DuplicateRequest(request_id)
        if len(self.live) >= self.max_live:
            raise Overloaded("the queue is full", retry_after_s=0.25)
        stream = self.live[request_id] = ScriptedStream(request_id)
        if deadline_s is not None:
            expire = DeadlineExceeded(request_id, "running")
            stream.timer = asyncio.get_running_loop().call_at(deadline_s, self._end, stream, expire)
        return stream

    def submit(self, stream: RequestStream, request: Request) -> None:
        """Start the script."""
        assert isinstance(stream, ScriptedStream)
        if stream.request_id in self.live:
            self.submitted.append(request)
            stream.task = asyncio.get_running_loop().create_task(self._play(stream, request))

    def abort(self, request_id: str) -> bool:
        """End the request."""
        self.abort_calls.append(request_id)
        stream = self.live.get(request_id)
        if stream is None:
            return False
        stream.queue.put_nowait(
            Finished(0, FinishReason.ABORT, None, 0, 0, 0, timing=Timing(), speculation=SpeculationStats())
        )
        self._end(stream, None)
        return True

    def release(self, request_id: str) -> None:
        """Note it."""
        self.released.append(request_id)

    def statistics(self) -> EngineStatistics:
        """Live requests, and numbers to recognise."""
        return EngineStatistics(
            num_running=len(self.live), kv_blocks_total=64, draft_tokens_per_position=(5, 4), num_steps=7
        )

    def now(self) -> float:
        """The loop's clock."""
        return asyncio.get_running_loop().time()

    async def _play(self, stream: ScriptedStream, request: Request) -> None:
        try:
            async for event in self.script(request):
                stream.queue.put_nowait(event)
        except Exception as error:
            self._end(stream, error)
        else:
            self._end(stream, None)

    def _end(self, stream: ScriptedStream, error: Exception | None) -> None:
        stream.queue.put_nowait(error)
        self.live.pop(stream.request_id, None)
        if stream.timer is not None:
            stream.timer.cancel()
        if stream.task is not None and stream.task is not asyncio.current_task():
            stream.task.cancel()
