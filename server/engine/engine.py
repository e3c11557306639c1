"""Our own engine as the event loop sees it: requests and their streams in front of the step loop."""

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from server.engine.detokenize import Decoder, RememberingDecoder
from server.engine.live_request import LiveRequest
from server.engine.protocol import EngineStatistics, RequestStream
from server.engine.speculation_control import SpeculationControl
from server.engine.step_loop import StepLoop
from server.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineDead,
    InvalidRequest,
    OutriderError,
    Overloaded,
    RequestFailed,
)
from server.request import ModelInfo, Request
from server.scheduler.outputs import Failure, SequenceOutput
from server.speculation_state import SpeculationChange, SpeculationState

logger = logging.getLogger(__name__)


class NativeEngine:
    """Implements engine.protocol.Engine on a step loop in this process.

    Belongs to the event loop that it was started on: everything is called there and never blocks. What steps bring
    comes there as well, once per step.
    """

    def __init__(
        self,
        steps: StepLoop,
        decoder: Decoder,
        model_info: ModelInfo,
        speculation: SpeculationControl,
        *,
        max_queued_requests: int,
        max_num_seqs: int,
        stream_interval: int = 1,
        on_stop: Callable[[], None] = lambda: None,
        on_stopped: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        steps: not started yet.
        speculation: what may change of it while requests run.
        stream_interval: tokens of a choice that gather before they are streamed; the first goes at once.
        on_stop: called when the step thread is to end. on_stopped: called once it has ended; may take seconds.
        clock: the step loop's.
        """
        self._steps = steps
        self._decoder = RememberingDecoder(decoder)
        self._model_info = model_info
        self._speculation = speculation
        self._max_queued = max_queued_requests
        self._max_num_seqs = max_num_seqs
        self._stream_interval = stream_interval
        self._on_stop = on_stop
        self._on_stopped = on_stopped
        self._clock = clock
        self._live: dict[str, LiveRequest] = {}
        self._queued: set[str] = set()
        self._awaited: set[asyncio.Future[SpeculationState]] = set()
        self._loop: asyncio.AbstractEventLoop

    @property
    def model_info(self) -> ModelInfo:
        """The loaded model and its limits; of speculation what holds now."""
        return self._model_info

    @property
    def speculation(self) -> SpeculationState:
        """What holds of speculation from the next step on; may be read from any thread."""
        return self._speculation.state

    @property
    def is_alive(self) -> bool:
        """Whether the step thread runs."""
        return self._steps.is_alive

    async def start(self, on_death: Callable[[], None] = lambda: None) -> None:
        """Start the step thread and wait until it is warm; requests may be opened meanwhile.

        Called once, on the event loop that will read the streams.

        Args: on_death: called there if the step thread dies, once open streams have ended with EngineDead.
        """
        self._loop = asyncio.get_running_loop()
        is_warm: asyncio.Future[None] = self._loop.create_future()
        self._steps.start(
            on_warm=partial(self._post, self._end_warm_up, is_warm),
            on_outputs=partial(self._post, self._deliver),
            on_death=partial(self._post, self._die, on_death),
        )
        await is_warm

    async def stop(self) -> None:
        """End the step thread after the step it is in; open streams end with EngineDead."""
        self._on_stop()
        self._steps.end()
        await asyncio.to_thread(self._steps.join)
        try:
            await asyncio.to_thread(self._on_stopped)
        except Exception:  # foreign code, as a connector's: streams and telemetry are to end in order all the same
            logger.exception("what ends with the engine failed")
        self._close_all(EngineDead("the server was stopped"))

    def now(self) -> float:
        """Seconds on the engine's monotonic clock."""
        return self._clock()

    def open(self, request_id: str, *, deadline_s: float | None = None) -> RequestStream:
        """Reserve the id and a place in the queue; see Engine.open."""
        if not self.is_alive:
            raise EngineDead("the engine has stopped; the server must be restarted")
        if request_id in self._live:
            raise DuplicateRequest(request_id)
        # A request that was not started yet waits only if it finds no free seat.
        num_waiting = len(self._queued) - max(0, self._max_num_seqs - self._steps.statistics.num_running)
        if num_waiting >= self._max_queued:
            message = f"the queue is full: {num_waiting} requests wait, the limit is {self._max_queued}"
            raise Overloaded(message, retry_after_s=1.0)
        live = self._live[request_id] = LiveRequest(request_id, self._stream_interval)
        self._queued.add(request_id)
        if deadline_s is not None:
            delay_s = deadline_s - self._clock()
            expired = DeadlineExceeded(request_id, "tokenising")
            live.expiry = asyncio.get_running_loop().call_later(delay_s, self._break_off, request_id, expired)
        return live.mailbox

    def submit(self, stream: RequestStream, request: Request) -> None:
        """Hand over the tokenised request of an opened stream; ignored once that was aborted."""
        live = self._live.get(request.request_id)
        if live is None or live.mailbox is not stream:
            return
        live.submit(request, self._decoder)
        if live.expiry is not None:
            live.expiry.cancel()
        self._steps.add(request)

    def abort(self, request_id: str) -> bool:
        """End a live request; idempotent. Returns: whether a live request of that id was found."""
        if request_id not in self._live:
            return False
        live = self._remove(request_id)
        live.abort(self._clock())
        self._steps.abort(request_id)
        return True

    def release(self, request_id: str) -> None:
        """Nobody goes on with what was handed on of a request; see Engine.release."""
        self._steps.release(request_id)

    async def set_speculation(self, change: SpeculationChange) -> SpeculationState:
        """Change speculation between two steps, for all requests; see Engine.set_speculation."""
        if not self.is_alive:
            raise EngineDead("the engine has stopped; the server must be restarted")
        changed: asyncio.Future[SpeculationState] = asyncio.get_running_loop().create_future()
        self._awaited.add(changed)
        self._steps.run_between_steps(partial(self._apply, change, changed))
        try:
            return await changed
        finally:
            self._awaited.remove(changed)

    def statistics(self) -> EngineStatistics:
        """A snapshot; requests that are still tokenising count as waiting."""
        num_tokenising = sum(not live.is_submitted for live in list(self._live.values()))
        snapshot = self._steps.statistics
        return dataclasses.replace(snapshot, num_waiting=snapshot.num_waiting + num_tokenising)

    def _apply(self, change: SpeculationChange, changed: "asyncio.Future[SpeculationState]") -> None:
        """On the step thread."""
        try:
            state = self._speculation.apply(change)
        except Exception as error:
            self._post(_resolve, changed, error)
            return
        self._model_info = state.reported(self._model_info)
        self._post(_resolve, changed, state)

    def _end_warm_up(self, is_warm: "asyncio.Future[None]", error: Exception | None) -> None:
        if is_warm.cancelled():  # whoever has started it stops it
            return
        if error is None:
            is_warm.set_result(None)
            return
        is_warm.set_exception(error)
        self._close_all(EngineDead("the engine did not start"))

    def _die(self, on_death: Callable[[], None]) -> None:
        self._close_all(EngineDead("the engine has failed; the server must be restarted"))
        on_death()

    def _remove(self, request_id: str) -> LiveRequest:
        live = self._live.pop(request_id)
        self._queued.discard(request_id)
        if live.expiry is not None:
            live.expiry.cancel()
        return live

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            request = output.request
            live = self._live.get(request.request_id)
            if live is None or live.request is not request:
                continue  # ended, and perhaps opened again under the same id
            if output.failure is not None:
                self._break_off(request.request_id, self._error_of(output))
                continue
            try:
                self._deliver_one(live, output)
            except Exception as error:  # detokenising: this request is broken, the others are not
                self._break_off(request.request_id, self._failed(request.request_id, "detokenising failed", error))

    def _deliver_one(self, live: LiveRequest, output: SequenceOutput) -> None:
        request_id = output.request.request_id
        if not live.is_started:
            self._queued.discard(request_id)
        if live.deliver(output):
            self._steps.abort(request_id, output.choice)
        if live.is_finished:
            self._remove(request_id).mailbox.close()
            if output.request.hands_on and not live.is_handed_on:  # by stop strings, which the scheduler does not see
                self.release(request_id)

    def _error_of(self, output: SequenceOutput) -> OutriderError:
        request_id = output.request.request_id
        if output.failure is Failure.EXPIRED:
            return DeadlineExceeded(request_id, output.error)
        if output.failure is Failure.REFUSED:
            return InvalidRequest.of("sampling", output.error)
        return self._failed(request_id, output.error, None)

    def _break_off(self, request_id: str, error: OutriderError) -> None:
        """End a live request with an error."""
        self._remove(request_id).break_off(error, self._clock())
        self._steps.abort(request_id)

    def _failed(self, request_id: str, message: str, error: Exception | None) -> RequestFailed:
        error_id = uuid.uuid4().hex
        logger.error("request %r failed, error id %s: %s", request_id, error_id, message, exc_info=error)
        return RequestFailed(message, error_id=error_id)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        """Have something called on the event loop; from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def _close_all(self, error: OutriderError) -> None:
        for awaited in self._awaited:
            _resolve(awaited, error)
        for request_id in list(self._live):
            self._remove(request_id).break_off(error, self._clock())


def _resolve(awaited: "asyncio.Future[SpeculationState]", outcome: SpeculationState | Exception) -> None:
    """Hand over what was awaited, or the error in its place, unless nobody waits any more."""
    if awaited.done():
        return
    if isinstance(outcome, Exception):
        awaited.set_exception(outcome)
    else:
        awaited.set_result(outcome)
