"""What steps brought and the event loop has not heard of yet."""

from collections.abc import Callable, Sequence

from server.scheduler.outputs import SequenceOutput

MIN_SEQUENCES = 4
"""With fewer, messages cost too little to let tokens wait."""


class Outbox:
    """Keeps the outputs of a few steps together where readers would hardly notice; used from the step thread only.

    On the CPU whoever sends and reads a message takes the cores that steps compute on. What is kept is never the
    first token of a choice nor its end, nor anything while few sequences run.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        """Args: patience_s: how long an output may be kept, if steps go on as they do; 0 keeps none."""
        self._patience_s = patience_s
        self._clock = clock
        self._kept: list[SequenceOutput] = []
        self._is_due = False
        self._oldest_s = self._last_s = clock()

    def put(self, outputs: Sequence[SequenceOutput], num_running: int) -> None:
        """Take in what a step brought, of which there may be nothing; so many sequences run."""
        now_s = self._clock()
        step_s, self._last_s = now_s - self._last_s, now_s
        if not self._kept:
            self._oldest_s = now_s
        self._kept += outputs
        may_wait = num_running >= MIN_SEQUENCES and now_s + step_s - self._oldest_s < self._patience_s
        self._is_due = self._is_due or not may_wait or not all(map(_may_wait, outputs))

    def make_due(self) -> None:
        """Let nothing wait for the step that is to be launched: it is of another kind than the last ones."""
        self._is_due = True

    def take_due(self) -> list[SequenceOutput]:
        """What need not wait for another step, in order; often nothing."""
        return self.take_all() if self._is_due else []

    def take_all(self) -> list[SequenceOutput]:
        """All there is, in order: no step follows."""
        kept, self._kept, self._is_due = self._kept, [], False
        return kept


def _may_wait(output: SequenceOutput) -> bool:
    is_end = output.finish_reason is not None or output.failure is not None
    return bool(output.token_ids) and not output.is_first and not is_end
