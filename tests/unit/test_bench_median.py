"""How sure a median is."""

import math
import random

import pytest

from server.commands.bench_median import median_interval, summary


def test_a_summary_has_the_spread() -> None:
    assert summary([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "interval": None, "all": [3.0, 1.0, 2.0]}


@pytest.mark.parametrize(
    ("count", "interval"), [(1, None), (5, None), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (15, (4, 12)), (20, (6, 15))]
)
def test_an_interval_has_the_ranks_of_the_binomial_distribution(count: int, interval: tuple[int, int] | None) -> None:
    assert median_interval([float(value) for value in range(count, 0, -1)]) == interval


def test_an_interval_has_the_true_median_in_it_nearly_always() -> None:
    source = random.Random(0)
    hits = 0
    for _ in range(1000):
        interval = median_interval([source.expovariate(1.0) for _ in range(9)])
        assert interval is not None
        hits += interval[0] <= math.log(2) <= interval[1]
    assert hits >= 950
