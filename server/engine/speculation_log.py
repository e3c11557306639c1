"""What speculation did for one choice, as it goes on."""

from server.engine.protocol import SpeculationStats
from server.request import SpeculationOptions
from server.scheduler.statistics import StepTime


class SpeculationLog:
    """Counts the steps of one choice that verified drafts; used from the event loop only."""

    def __init__(self, options: SpeculationOptions) -> None:
        most = options.num_speculative_tokens if options.enabled else 0
        self._histogram = [0] * (1 + most) if most else []
        self._is_synthetic = options.is_synthetic
        self._is_detailed = options.metrics == "detailed"
        self._proposed: list[int] = []
        self._accepted: list[int] = []
        self._num_drafted = 0
        self._draft_s = self._verify_s = 0.0

    def add(self, num_drafted: int, num_accepted: int, step_time: StepTime) -> None:
        """Count a step that brought tokens; one without drafts of this choice may have proposed some for the next."""
        self._draft_s += step_time.draft_s
        if num_drafted == 0:
            return
        self._verify_s += step_time.verify_s
        self._num_drafted += num_drafted
        if num_accepted >= len(self._histogram):  # of a request that was not given its bounds
            self._histogram += [0] * (1 + num_accepted - len(self._histogram))
        self._histogram[num_accepted] += 1
        if self._is_detailed:
            self._proposed.append(num_drafted)
            self._accepted.append(num_accepted)

    def stats(self) -> SpeculationStats:
        """A snapshot."""
        num_steps = sum(self._histogram)
        return SpeculationStats(
            num_spec_steps=num_steps,
            num_draft_tokens=self._num_drafted,
            num_accepted_draft_tokens=sum(i * count for i, count in enumerate(self._histogram)),
            acceptance_histogram=tuple(self._histogram),
            proposed_per_step=tuple(self._proposed),
            accepted_per_step=tuple(self._accepted),
            is_synthetic=self._is_synthetic and num_steps > 0,
            draft_s=self._draft_s,
            verify_s=self._verify_s,
        )
