"""What the scheduler counts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from connectors.save_failure import SaveFailure


class StepTime(NamedTuple):
    """What speculation made of a step's seconds; a step lasts from when the one before it settled, or its launch.

    Attributes:
        draft_s: went into proposing drafts for the step after it.
        verify_s: all others, of a step that verified drafts; 0 for one that did not.
    """

    draft_s: float = 0.0
    verify_s: float = 0.0


@dataclass(slots=True)
class Counters:
    """Counts since the start; read through Scheduler.statistics().

    Attributes:
        draft_s, num_draft_steps: time spent proposing, and in how many steps.
        verify_s, num_verify_steps: time of the steps that verified drafts less their draft_s, and their number.
        external_queried_tokens, external_loaded_tokens: that were not here when a connector was asked for them, and
            those that it brought.
        num_failed_loads: that brought less than they should, or nothing in time.
        num_unsaved_blocks: that were used for something else before it was their turn to be saved.
        save_failures: blocks that a store did not keep, by why.
        num_unreadable_handles: requests whose KV is where no connector of this node reads, or does not fit it.
    """

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    num_draft_steps: int = 0
    num_verify_steps: int = 0
    external_queried_tokens: int = 0
    external_loaded_tokens: int = 0
    num_failed_loads: int = 0
    num_unsaved_blocks: int = 0
    save_failures: Counter[SaveFailure] = field(default_factory=Counter)
    num_unreadable_handles: int = 0
    _rows_drafted: list[int] = field(default_factory=lambda: [0])
    _rows_accepted: list[int] = field(default_factory=lambda: [0])
    _steps_by_limit: list[int] = field(default_factory=lambda: [0])

    def count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """Add one row's drafts."""
        _count(self._rows_drafted, num_drafted)
        _count(self._rows_accepted, num_accepted)

    def count_step(self, draft_limit: int | None, step_time: StepTime, *, is_verifying: bool) -> None:
        """Add a settled step, whose rows were to verify so many drafts at most; None if none of them could."""
        if draft_limit is not None:
            _count(self._steps_by_limit, draft_limit)
        self.draft_s += step_time.draft_s
        self.verify_s += step_time.verify_s
        self.num_draft_steps += step_time.draft_s > 0
        self.num_verify_steps += is_verifying

    @property
    def drafted(self) -> tuple[int, ...]:
        """Drafts that were verified, by position."""
        return _by_position(self._rows_drafted)

    @property
    def accepted(self) -> tuple[int, ...]:
        """Drafts that were accepted, by position."""
        return _by_position(self._rows_accepted)

    @property
    def steps_per_draft_limit(self) -> tuple[int, ...]:
        """Settled steps of sequences that may be drafted for, by the most drafts that they were to verify, from 0."""
        return tuple(self._steps_by_limit)


def _count(counts: list[int], number: int) -> None:
    if number >= len(counts):
        counts.extend([0] * (1 + number - len(counts)))
    counts[number] += 1


def _by_position(rows: Sequence[int]) -> tuple[int, ...]:
    """From how many rows had so many drafts to how many had one at each position."""
    return tuple(accumulate(reversed(rows[1:])))[::-1]
