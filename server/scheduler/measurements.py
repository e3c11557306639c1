"""What draft policies measure: running means that forget, and the duration of steps with about so many rows."""

from collections import deque
from dataclasses import dataclass, field

TRIES = 2
"""Steps of a kind after which their duration is known."""
_NUM_REMEMBERED = 12
"""Steps whose lower quartile is what a step takes: more than a machine is held up for on end."""


@dataclass(slots=True)
class Mean:
    """A running mean that forgets."""

    value: float
    count: int = 0

    def add(self, sample: float, memory: int) -> None:
        """Take a sample in. Args: memory: samples after which one counts for little."""
        self.count += 1
        self.value += (sample - self.value) / min(self.count, memory)


@dataclass(slots=True)
class Duration:
    """Of steps of one kind, on a machine that delays them now and then: alike for a few of them and many."""

    seconds: float = float("inf")
    count: int = 0
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_REMEMBERED))

    @property
    def is_known(self) -> bool:
        """Whether it was measured often enough."""
        return self.count >= TRIES

    def add(self, duration_s: float) -> None:
        """Take a step in."""
        self.count += 1
        self._last.append(duration_s)
        self.seconds = sorted(self._last)[len(self._last) // 4]


def row_class(num_rows: int) -> int:
    """The largest number of rows that is measured together with this one: up to 4 each alone, then by powers of two."""
    return num_rows if num_rows <= 4 else 1 << (num_rows - 1).bit_length()
