"""Our own engine: the event loop's side, and the thread that steps."""

import asyncio
import dataclasses
import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from server.engine.detokenize import Decoder, RememberingDecoder
from server.engine.live_request import LiveRequest
from server.engine.lock_wait import blocked_clock
from server.engine.outbox import Outbox
from server.engine.protocol import EngineStatistics, RequestStream
from server.engine.speculation_control import SpeculationControl
from server.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineDead,
    InvalidRequest,
    OutriderError,
    Overloaded,
    RequestFailed,
)
from server.events import EventBus, StepFinished
from server.plan import Executor, RowResult, StepPlan, StepResult, Transferring
from server.request import ModelInfo, Request
from server.scheduler.outputs import Failure, SequenceOutput
from server.scheduler.scheduler import Scheduler
from server.speculation_state import SpeculationChange, SpeculationState

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Steps that may fail in a row before the engine gives up: the device is then beyond repair."""
REST_S = 0.005
"""How long the step thread waits for news while requests wait for something else than a step."""


class NativeEngine:
    """Implements engine.protocol.Engine on the scheduler and an executor in this process.

    One step thread owns scheduler and executor. Everyone else leaves callables in its inbox, and
    it hands outputs to the event loop once per step. Everything public but `start` and `stop`
    runs on the event loop and never blocks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        decoder: Decoder,
        model_info: ModelInfo,
        bus: EventBus,
        *,
        pipeline_depth: int,
        max_queued_requests: int,
        max_num_seqs: int,
        stream_interval: int = 1,
        stream_patience_s: float = 0.0,
        speculation: SpeculationControl | None = None,
        transferring: Transferring | None = None,
        warm_up: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
        on_stopped: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        make_blocked_clock: Callable[[], Callable[[], float]] = blocked_clock,
    ) -> None:
        """Args:
        pipeline_depth: 0 settles each step at once, 1 launches the next one first.
        stream_interval: tokens of a choice that gather before they are streamed; the first goes at once.
        stream_patience_s: how long tokens of several sequences may wait for those of the next steps; see Outbox.
        speculation: what may change of it while requests run; nothing, if None.
        transferring: moves the scheduler's external KV; None where it has none.
        warm_up: called on the step thread before its first step; whatever it raises ends the start.
        on_stop: called when the step thread is to end. on_stopped: called once it has ended; may take seconds.
        make_blocked_clock: called there; the clock tells how long that thread has waited for the interpreter lock.
        """
        self._scheduler = scheduler
        self._executor = executor
        self._decoder = RememberingDecoder(decoder)
        self._model_info = model_info
        self._bus = bus
        self._depth = pipeline_depth
        self._max_queued = max_queued_requests
        self._max_num_seqs = max_num_seqs
        self._stream_interval = stream_interval
        self._speculation = speculation or SpeculationControl(None, (), scheduler.drafts)
        self._transferring = transferring
        self._warm_up = warm_up
        self._on_stop = on_stop
        self._on_stopped = on_stopped
        self._clock = clock
        self._make_blocked_clock = make_blocked_clock
        self._live: dict[str, LiveRequest] = {}
        self._queued: set[str] = set()
        self._awaited: set[asyncio.Future[SpeculationState]] = set()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._in_flight: deque[tuple[StepPlan, Any, float]] = deque()
        self._outbox = Outbox(stream_patience_s, clock)
        self._num_failed_steps = 0
        self._is_resting = True
        self._awaiting_quiet: list[tuple[Callable[[], None], float]] = []
        self._snapshot = scheduler.statistics()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_warm: asyncio.Future[None]
        self._on_death: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="outrider-step", daemon=True)
        self._is_dead = False

    # -- the event loop's side -------------------------------------------------------------

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
        return self._thread.is_alive() and not self._is_dead

    async def start(self, on_death: Callable[[], None] = lambda: None) -> None:
        """Start the step thread and wait until it is warm; requests may be opened meanwhile.

        Called once, on the event loop that will read the streams.

        Args: on_death: called there if the step thread dies, once open streams have ended with EngineDead.
        """
        self._loop = asyncio.get_running_loop()
        self._on_death = on_death
        self._is_warm = self._loop.create_future()
        self._thread.start()
        await self._is_warm

    async def stop(self) -> None:
        """End the step thread after the step it is in; open streams end with EngineDead."""
        self._on_stop()
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._on_stopped)
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
        num_waiting = len(self._queued) - max(0, self._max_num_seqs - self._snapshot.num_running)
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
        self._inbox.put(partial(self._scheduler.add, request))

    def abort(self, request_id: str) -> bool:
        """End a live request; idempotent. Returns: whether a live request of that id was found."""
        if request_id not in self._live:
            return False
        live = self._remove(request_id)
        live.abort(self._clock())
        self._inbox.put(partial(self._scheduler.abort, request_id))
        return True

    def release(self, request_id: str) -> None:
        """Nobody goes on with what was handed on of a request; see Engine.release."""
        self._inbox.put(partial(self._scheduler.release, request_id))

    async def set_speculation(self, change: SpeculationChange) -> SpeculationState:
        """Change speculation between two steps, for all requests; see Engine.set_speculation."""
        if not self.is_alive:
            raise EngineDead("the engine has stopped; the server must be restarted")
        changed: asyncio.Future[SpeculationState] = asyncio.get_running_loop().create_future()
        self._awaited.add(changed)
        self._inbox.put(partial(self._set_speculation, change, changed))
        try:
            return await changed
        finally:
            self._awaited.remove(changed)

    def run_between_steps(self, action: Callable[[], None]) -> None:
        """Run something on the step thread before its next step; may be called from any thread.

        Args: action: quick; what it raises ends the engine.
        """
        self._inbox.put(action)

    def run_when_quiet(self, action: Callable[[], None], patience_s: float) -> None:
        """Run something on the step thread while no request is under way; may be called from any thread.

        Once there was no such moment for `patience_s`, new requests are held back until what runs has ended.

        Args: action: if it raises, everything goes on, with the error in the log.
        """
        awaited = action, self._clock() + patience_s
        self._inbox.put(lambda: self._awaiting_quiet.append(awaited))

    def statistics(self) -> EngineStatistics:
        """A snapshot; requests that are still tokenising count as waiting."""
        num_tokenising = sum(not live.is_submitted for live in list(self._live.values()))
        snapshot = self._snapshot
        return dataclasses.replace(snapshot, num_waiting=snapshot.num_waiting + num_tokenising)

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
            self._inbox.put(partial(self._scheduler.abort, request_id, output.choice))
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
        self._inbox.put(partial(self._scheduler.abort, request_id))

    def _failed(self, request_id: str, message: str, error: Exception | None) -> RequestFailed:
        error_id = uuid.uuid4().hex
        logger.error("request %r failed, error id %s: %s", request_id, error_id, message, exc_info=error)
        return RequestFailed(message, error_id=error_id)

    def _close_all(self, error: OutriderError) -> None:
        for awaited in self._awaited:
            _resolve(awaited, error)
        for request_id in list(self._live):
            self._remove(request_id).break_off(error, self._clock())

    # -- the step thread -------------------------------------------------------------------

    def _run(self) -> None:
        self._blocked_clock = self._make_blocked_clock()
        try:
            self._warm_up()
        except Exception as error:
            self._is_dead = True
            self._post(partial(self._is_warm.set_exception, error))
            self._post(partial(self._close_all, EngineDead("the engine did not start")))
            return
        self._post(partial(self._is_warm.set_result, None))
        try:
            while self._take_messages():
                self._run_when_quiet()
                self._step()
            self._begin_transfers()  # whoever stops as soon as it has its answer wants the blocks to be saved, too
            self._post_outputs(self._outbox.take_all())
        except Exception:
            logger.exception("the step thread has died")
            self._is_dead = True
            self._post(partial(self._close_all, EngineDead("the engine has failed; the server must be restarted")))
            self._post(self._on_death)

    def _take_messages(self) -> bool:
        """Run what others left; wait for more while there is nothing to do. Returns: False to stop."""
        has_work = self._scheduler.has_requests or self._in_flight or self._awaiting_quiet
        # A step's last blocks are offered once it has settled: the round after it, without rows, orders their saves.
        is_idle = self._is_resting and not has_work
        is_waiting = is_idle or self._is_resting
        try:
            message = self._inbox.get(block=is_waiting, timeout=None if is_idle else REST_S)
            if is_waiting:
                self._blocked_s = self._blocked_clock()  # waiting for work is no loss
            while message is not None:
                message()
                message = self._inbox.get_nowait()
            return False
        except queue.Empty:
            if is_waiting:
                self._blocked_s = self._blocked_clock()
            return True

    def _set_speculation(self, change: SpeculationChange, changed: "asyncio.Future[SpeculationState]") -> None:
        try:
            state = self._speculation.apply(change)
        except Exception as error:
            self._post(partial(_resolve, changed, error))
            return
        self._model_info = state.reported(self._model_info)
        self._post(partial(_resolve, changed, state))

    def _run_when_quiet(self) -> None:
        if not self._awaiting_quiet:
            return
        if self._in_flight or self._scheduler.has_started:
            self._scheduler.holds_admission = self._clock() >= min(until_s for _, until_s in self._awaiting_quiet)
            return
        self._scheduler.holds_admission = False
        actions, self._awaiting_quiet = self._awaiting_quiet, []
        for action, _ in actions:
            try:
                action()
            except Exception as error:  # what it should have changed is as it was
                logger.warning("%s", error)

    def _step(self) -> None:
        if self._transferring is not None:
            finished, bad_blocks = self._transferring.poll_transfers()
            if finished:
                self._scheduler.update_transfers(finished, bad_blocks)
        plan = self._scheduler.schedule()
        if plan is None:
            self._begin_transfers()
        elif any(row.num_query > 1 + row.num_drafts for row in plan.rows):  # prompts, which take as long as they are
            self._outbox.make_due()
        self._is_resting = plan is None and not self._in_flight
        if plan is not None:
            launched_s = self._clock()
            self._in_flight.append((plan, self._launch(plan), launched_s))
            # What a failed launch should have started is missing on the device: its rows must end first.
            depth = 0 if isinstance(self._in_flight[-1][1], Exception) else self._depth
        else:
            depth = 0
        # Not before the launch: the loop would take the interpreter lock while the device waits for work.
        self.hand_over()
        while len(self._in_flight) > depth:
            self._settle_oldest()
        self._snapshot = self._scheduler.statistics()
        self._outbox.put(self._scheduler.take_outputs(), self._snapshot.num_running)
        if plan is None:  # no launch may follow
            self._post_outputs(self._outbox.take_all())

    def _begin_transfers(self) -> None:
        """Without a step that they would begin with."""
        external = self._scheduler.external
        if self._transferring is None or external is None:
            return
        if (transfers := external.plan()) is not None:
            self._transferring.begin_transfers(transfers)

    def hand_over(self) -> None:
        """Let the event loop have the last steps' outputs, if it has them not yet and they are not to wait.

        By an executor that computes while it launches, once it does so without the interpreter: else they would wait
        for as long as that takes. On the step thread.
        """
        self._post_outputs(self._outbox.take_due())

    def _post_outputs(self, outputs: list[SequenceOutput]) -> None:
        if outputs:
            self._post(partial(self._deliver, outputs))

    def _launch(self, plan: StepPlan) -> Any:
        try:
            return self._executor.launch(plan)
        except Exception as error:
            return error

    def _settle_oldest(self) -> None:
        plan, handle, launched_s = self._in_flight.popleft()
        try:
            if isinstance(handle, Exception):
                raise handle
            result = self._executor.settle(handle)
            self._num_failed_steps = 0
        except Exception as error:
            self._num_failed_steps += 1
            logger.exception("a step of %d rows failed", len(plan.rows))
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                raise
            message = f"the step failed: {type(error).__name__}"
            result = StepResult(tuple(RowResult(row.seq_id, row.epoch, error=message) for row in plan.rows))
        step_time = self._scheduler.update(result)
        blocked_before_s, self._blocked_s = self._blocked_s, self._blocked_clock()
        self._bus.publish(
            StepFinished(
                duration_s=self._clock() - launched_s,
                num_rows=len(plan.rows),
                num_query_tokens=sum([row.num_query for row in plan.rows]),
                num_generated_tokens=sum([len(row.token_ids) for row in result.rows]),
                # Clocks of different grain may differ by a little when nothing was waited for.
                lock_wait_s=max(0.0, self._blocked_s - blocked_before_s),
                draft_s=step_time.draft_s,
                verify_s=step_time.verify_s,
            )
        )

    def _post(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)


def _resolve(awaited: "asyncio.Future[SpeculationState]", outcome: SpeculationState | Exception) -> None:
    """Hand over what was awaited, or the error in its place, unless nobody waits any more."""
    if awaited.done():
        return
    if isinstance(outcome, Exception):
        awaited.set_exception(outcome)
    else:
        awaited.set_result(outcome)
