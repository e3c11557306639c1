"""The thread that steps: takes messages, plans, launches and settles, and hands over what steps brought."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from server.engine.lock_wait import blocked_clock
from server.engine.outbox import Outbox
from server.engine.protocol import EngineStatistics
from server.events import EventBus, StepFinished
from server.plan import Executor, RowResult, StepPlan, StepResult, Transferring
from server.request import Request
from server.scheduler.outputs import SequenceOutput
from server.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Steps that may fail in a row before the loop gives up: the device is then beyond repair."""
REST_S = 0.005
"""How long the step thread waits for news while requests wait for something else than a step."""


class StepLoop:
    """Owns scheduler and executor, which nobody but its thread calls.

    Everyone else leaves callables in its inbox, from any thread and without waiting: `add`, `abort`, `release`,
    `run_between_steps` and `run_when_quiet` do. It starts once and ends once.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        bus: EventBus,
        *,
        pipeline_depth: int,
        stream_patience_s: float = 0.0,
        transferring: Transferring | None = None,
        warm_up: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        make_blocked_clock: Callable[[], Callable[[], float]] = blocked_clock,
    ) -> None:
        """Args:
        pipeline_depth: 0 settles each step at once, 1 launches the next one first.
        stream_patience_s: how long tokens of several sequences may wait for those of the next steps; see Outbox.
        transferring: moves the scheduler's external KV; None where it has none.
        warm_up: called on the step thread before its first step; whatever it raises ends the start.
        make_blocked_clock: called there; the clock tells how long that thread has waited for the interpreter lock.
        """
        self._scheduler = scheduler
        self._executor = executor
        self._bus = bus
        self._depth = pipeline_depth
        self._transferring = transferring
        self._warm_up = warm_up
        self._clock = clock
        self._make_blocked_clock = make_blocked_clock
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._in_flight: deque[tuple[StepPlan, Any, float]] = deque()
        self._outbox = Outbox(stream_patience_s, clock)
        self._num_failed_steps = 0
        self._is_resting = True
        self._awaiting_quiet: list[tuple[Callable[[], None], float]] = []
        self._snapshot = scheduler.statistics()
        self._on_warm: Callable[[Exception | None], None]
        self._on_outputs: Callable[[list[SequenceOutput]], None]
        self._on_death: Callable[[], None]
        self._thread = threading.Thread(target=self._run, name="outrider-step", daemon=True)
        self._is_dead = False

    # -- for any thread --------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether the step thread runs."""
        return self._thread.is_alive() and not self._is_dead

    @property
    def statistics(self) -> EngineStatistics:
        """What held after the last step."""
        return self._snapshot

    def start(
        self,
        on_warm: Callable[[Exception | None], None],
        on_outputs: Callable[[list[SequenceOutput]], None],
        on_death: Callable[[], None],
    ) -> None:
        """Start the thread, which calls all three and is held up by them.

        Args:
            on_warm: before the first step, with the error if there will be none.
            on_outputs: with what steps brought, in order, never with nothing.
            on_death: once the thread ends by an error later than that.
        """
        self._on_warm, self._on_outputs, self._on_death = on_warm, on_outputs, on_death
        self._thread.start()

    def end(self) -> None:
        """Have the thread end after the step it is in."""
        self._inbox.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def add(self, request: Request) -> None:
        """Have a request computed."""
        self._inbox.put(partial(self._scheduler.add, request))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request or one choice of it; ignores unknown ids."""
        self._inbox.put(partial(self._scheduler.abort, request_id, choice))

    def release(self, request_id: str) -> None:
        """Let go what is held of a request that was handed on; ignores unknown ids."""
        self._inbox.put(partial(self._scheduler.release, request_id))

    def run_between_steps(self, action: Callable[[], None]) -> None:
        """Run something on the step thread before its next step.

        Args: action: quick; what it raises ends the thread.
        """
        self._inbox.put(action)

    def run_when_quiet(self, action: Callable[[], None], patience_s: float) -> None:
        """Run something on the step thread while no request is under way.

        Once there was no such moment for `patience_s`, new requests are held back until what runs has ended.

        Args: action: if it raises, everything goes on, with the error in the log.
        """
        awaited = action, self._clock() + patience_s
        self._inbox.put(lambda: self._awaiting_quiet.append(awaited))

    # -- the step thread -------------------------------------------------------------------

    def hand_over(self) -> None:
        """Let others have the last steps' outputs, if they have them not yet and these are not to wait.

        By an executor that computes while it launches, once it does so without the interpreter: else they would wait
        for as long as that takes. On the step thread.
        """
        self._post_outputs(self._outbox.take_due())

    def _run(self) -> None:
        self._blocked_clock = self._make_blocked_clock()
        try:
            self._warm_up()
        except Exception as error:
            self._is_dead = True
            self._on_warm(error)
            return
        self._on_warm(None)
        try:
            while self._take_messages():
                self._run_when_quiet()
                self._step()
            self._begin_transfers()  # whoever stops as soon as it has its answer wants the blocks to be saved, too
            self._post_outputs(self._outbox.take_all())
        except Exception:
            logger.exception("the step thread has died")
            self._is_dead = True
            self._on_death()

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

    def _post_outputs(self, outputs: list[SequenceOutput]) -> None:
        if outputs:
            self._on_outputs(outputs)

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
