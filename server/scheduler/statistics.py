"""What the scheduler counts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(slots=True)
class Counters:
    """Counts since the start; read through Scheduler.statistics()."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    _rows_drafted: list[int] = field(default_factory=lambda: [0])
    _rows_accepted: list[int] = field(default_factory=lambda: [0])

    def count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """Add one row's drafts."""
        for rows, number in ((self._rows_drafted, num_drafted), (self._rows_accepted, num_accepted)):
            if number >= len(rows):
                rows.extend([0] * (1 + number - len(rows)))
            rows[number] += 1

    @property
    def drafted(self) -> tuple[int, ...]:
        """Drafts that were verified, by position."""
        return _by_position(self._rows_drafted)

    @property
    def accepted(self) -> tuple[int, ...]:
        """Drafts that were accepted, by position."""
        return _by_position(self._rows_accepted)


def _by_position(rows: Sequence[int]) -> tuple[int, ...]:
    """From how many rows had so many drafts to how many had one at each position."""
    return tuple(accumulate(reversed(rows[1:])))[::-1]
