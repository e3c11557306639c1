"""Two engines by turns on one machine: what disturbs one round disturbs both of a pair alike."""

import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from tests.bench.sample import Prompts, Sample

CONFIDENCE = 0.95
_NUM_RESAMPLES = 10_000
_WAKE_INPUT_LEN, _WAKE_OUTPUT_LEN = 8, 4  # too few for a block of the prefix cache


class Contestant(Protocol):
    """A loaded engine that stands still unless it is running."""

    def running(self) -> AbstractContextManager[None]:
        """Lets it run; stopped again afterwards, whatever it may have left to do."""

    def measure(self, prompts: Prompts, output_len: int) -> Sample:
        """Generate `output_len` tokens for each prompt at once."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and the bounds of its confidence interval."""

    median: float
    low: float
    high: float


def interleave(
    ours: Contestant,
    theirs: Contestant,
    prompts: Callable[[], Prompts],
    output_len: int,
    num_pairs: int,
) -> list[tuple[Sample, Sample]]:
    """Measure both by turns, changing who is first, after one pair that does not count.

    Args: prompts: makes those of the next pair; fresh ones, so that no cache knows them.
    Returns: (ours, theirs) of each pair.
    """
    pairs = []
    for number in range(num_pairs + 1):
        batch = prompts()
        order = (ours, theirs) if number % 2 else (theirs, ours)
        samples = [_round(contestant, batch, output_len) for contestant in order]
        if number:
            pairs.append((samples[0], samples[1]) if order[0] is ours else (samples[1], samples[0]))
    return pairs


def median_ratio(ratios: Sequence[float], seed: int = 0) -> Interval:
    """The median, and its interval by the percentile bootstrap (Efron 1979) over the pairs."""
    source = random.Random(seed)
    medians = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(_NUM_RESAMPLES))
    tail = round(_NUM_RESAMPLES * (1 - CONFIDENCE) / 2)
    return Interval(statistics.median(ratios), medians[tail], medians[-1 - tail])


def _round(contestant: Contestant, prompts: Prompts, output_len: int) -> Sample:
    with contestant.running():
        # Threads, connections and caches that the other one's turn has cooled.
        contestant.measure([prompt[:_WAKE_INPUT_LEN] for prompt in prompts], _WAKE_OUTPUT_LEN)
        return contestant.measure(prompts, output_len)
