"""Quantiles of any number of values in bounded memory."""

import math
from collections.abc import Mapping

RELATIVE_ERROR = 0.005
"""A quantile is off by at most this share of its value; count, mean, minimum and maximum are exact."""

_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA = math.log(_GAMMA)
_LEAST = 1e-9


class Distribution:
    """Counts values in buckets of equal relative width.

    Bucket i holds (gamma^(i-1), gamma^i]; everything from a nanosecond to an hour, in
    seconds, is under 3,000 buckets. Source: Masson, Rim and Lee 2019, arXiv:1908.10693.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self._sum = 0.0
        self.count = 0
        self.minimum = math.inf
        self.maximum = -math.inf

    def add(self, value: float, count: int = 1) -> None:
        """Add `count` times the same value, at least 0; what is under 1e-9 counts as that in quantiles."""
        index = math.ceil(math.log(max(value, _LEAST)) / _LOG_GAMMA)
        self._buckets[index] = self._buckets.get(index, 0) + count
        self._sum += value * count
        self.count += count
        self.minimum = min(self.minimum, value)
        self.maximum = max(self.maximum, value)

    @property
    def mean(self) -> float:
        """The mean; NaN without values."""
        return self._sum / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """The smallest value that at least the share `q` of all values does not exceed; NaN without values."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(q * self.count))
        seen = 0
        for index in sorted(self._buckets):
            seen += self._buckets[index]
            if seen >= rank:
                break
        middle = 2 * _GAMMA**index / (_GAMMA + 1)
        return min(max(middle, self.minimum), self.maximum)

    def summary_ms(self) -> Mapping[str, float | int]:
        """Count, mean and percentiles of values in seconds, as milliseconds; only the count without values."""
        if not self.count:
            return {"count": 0}
        percentiles = {f"p{percent}": self.quantile(percent / 100) * 1e3 for percent in (50, 90, 95, 99)}
        bounds = {"min": self.minimum * 1e3, "max": self.maximum * 1e3}
        return {"count": self.count, "mean": self.mean * 1e3, **percentiles, **bounds}

    def histogram(self, max_bins: int) -> list[tuple[float, float, int]]:
        """(lower bound, upper bound, values in it) in bins of equal width from minimum to maximum.

        Returns: no more bins than values, one where all values are equal, none without values.
        """
        if not self.count:
            return []
        num_bins = min(max_bins, self.count)
        width = (self.maximum - self.minimum) / num_bins
        if width == 0:
            return [(self.minimum, self.maximum, self.count)]
        counts = [0] * num_bins
        for index, count in self._buckets.items():
            middle = min(max(2 * _GAMMA**index / (_GAMMA + 1), self.minimum), self.maximum)
            counts[min(int((middle - self.minimum) / width), num_bins - 1)] += count
        return [(self.minimum + i * width, self.minimum + (i + 1) * width, count) for i, count in enumerate(counts)]
