"""Medians of a few measured values, and how sure they are."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

CONFIDENCE = 0.95


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, spread and all of them; `interval` is that of the median, see `median_interval`."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "interval": median_interval(values),
        "all": list(values),
    }


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Bounds that have the true median between them with a probability of CONFIDENCE or more.

    They are two of the values, whatever the distribution: as many lie outside of each as a fair coin has heads less
    often than half of what may go wrong. None if there are too few values, which is less than six.
    """
    count = len(values)
    num_outside, left = -1, (1 - CONFIDENCE) / 2 * 2**count
    while (left := left - math.comb(count, num_outside + 1)) >= 0:
        num_outside += 1
    if num_outside < 0:
        return None
    ordered = sorted(values)
    return ordered[num_outside], ordered[-1 - num_outside]
