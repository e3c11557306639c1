"""The sequences that have not ended, and the ways in which one ends."""

import math
from collections.abc import Sequence as SequenceOf

from server.request import Request
from server.scheduler.batch import RunningBatch
from server.scheduler.external_kv import ExternalKV
from server.scheduler.outputs import Failure, SequenceOutput
from server.scheduler.sequence import Sequence
from server.scheduler.waiting import WaitingQueue


class LiveSequences:
    """Every sequence, waiting or running, until it ends; owned by the scheduler.

    Attributes:
        by_id: by sequence id, in the order they came.
        outputs: what callers are still to be told, in order.
    """

    def __init__(self, batch: RunningBatch, waiting: WaitingQueue, external: ExternalKV | None) -> None:
        self._batch = batch
        self._waiting = waiting
        self._external = external
        self._by_request: dict[str, list[Sequence]] = {}
        self._earliest_deadline_s = math.inf
        self.by_id: dict[int, Sequence] = {}
        self.outputs: list[SequenceOutput] = []

    def add(self, request: Request, choices: SequenceOf[Sequence]) -> None:
        """Queue every choice of a request."""
        for sequence in choices:
            self.by_id[sequence.seq_id] = sequence
            self._by_request.setdefault(request.request_id, []).append(sequence)
            self._waiting.add(sequence)
        if request.deadline_s is not None:
            self._earliest_deadline_s = min(self._earliest_deadline_s, request.deadline_s)

    def end(self, sequence: Sequence) -> None:
        """Take a sequence out; its blocks are free once no launched step touches them."""
        sequence.is_finished = True
        del self.by_id[sequence.seq_id]
        siblings = self._by_request[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[sequence.request.request_id]
            if self._external is not None:
                self._external.saves.forget(sequence.request.request_id)
        if sequence.slot is None:
            self._waiting.remove(sequence)
            if self._external is not None:
                self._external.loads.leave(sequence)
        else:
            self._batch.remove(sequence)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, without an output; unknown ids are ignored."""
        for sequence in list(self._by_request.get(request_id, ())):
            if choice is None or sequence.choice == choice:
                self.end(sequence)
        if self._external is not None:
            self._external.saves.abort(request_id, choice)
            if choice is None:
                self._external.saves.release(request_id)

    def fail(self, sequence: Sequence, failure: Failure, error: str, now: float) -> None:
        """End a whole request with an error."""
        self.outputs.append(SequenceOutput.of(sequence, now)._replace(failure=failure, error=error))
        self.abort(sequence.request.request_id)

    def take_outputs(self) -> list[SequenceOutput]:
        """The outputs since the last call, in order."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def expire(self, now: float) -> None:
        """End requests whose deadline has passed; a queued one is never started."""
        if now < self._earliest_deadline_s:
            return
        earliest_s = math.inf
        for choices in list(self._by_request.values()):
            deadline_s = choices[0].request.deadline_s
            if deadline_s is None:
                continue
            if deadline_s > now:
                earliest_s = min(earliest_s, deadline_s)
                continue
            is_running = any(sequence.scheduled_s is not None for sequence in choices)
            self.fail(choices[0], Failure.EXPIRED, "running" if is_running else "queued", now)
        self._earliest_deadline_s = earliest_s
