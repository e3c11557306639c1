"""Finds stop strings in text that arrives in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string and where it starts in the whole text, in characters."""

    stop: str
    start: int

    @property
    def end(self) -> int:
        """One past its last character."""
        return self.start + len(self.stop)


def find_stop(text: str, num_seen: int, stops: Sequence[str]) -> StopMatch | None:
    """The stop string that starts first among those ending after the first `num_seen` characters."""
    best: StopMatch | None = None
    for stop in stops:
        start = text.find(stop, max(0, num_seen - len(stop) + 1))
        if start >= 0 and (best is None or start < best.start):
            best = StopMatch(stop, start)
    return best


def held_back_length(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
