"""The arithmetic behind a benchmark's report."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.distribution import RELATIVE_ERROR, Distribution
from clients.measurements import Goodput, Measurements, RequestTimer
from clients.outputs import Finished, SpeculationStats, Timing, Usage

latencies = st.floats(min_value=1e-6, max_value=1e4)


def of(values: list[float]) -> Distribution:
    distribution = Distribution()
    for value in values:
        distribution.add(value)
    return distribution


@given(st.lists(latencies, min_size=1, max_size=60), st.floats(min_value=0, max_value=1))
def test_a_quantile_is_the_nearest_rank_within_the_stated_error(values: list[float], q: float) -> None:
    exact = sorted(values)[max(1, math.ceil(q * len(values))) - 1]
    assert of(values).quantile(q) == pytest.approx(exact, rel=RELATIVE_ERROR * 1.001)


def test_percentiles_of_known_values() -> None:
    summary = of([i / 1000 for i in range(1, 101)]).summary_ms()
    assert summary["count"] == 100
    assert summary["mean"] == pytest.approx(50.5)
    assert (summary["min"], summary["max"]) == pytest.approx((1, 100))
    for percent in (50, 90, 95, 99):
        assert summary[f"p{percent}"] == pytest.approx(percent, rel=RELATIVE_ERROR)


@given(latencies, st.integers(min_value=1, max_value=1000))
def test_a_weight_is_as_many_values(value: float, count: int) -> None:
    weighted = Distribution()
    weighted.add(value, count)
    assert weighted.count == count
    assert weighted.mean == pytest.approx(value)
    assert weighted.quantile(0.5) == pytest.approx(value, rel=RELATIVE_ERROR)


def test_no_values_have_no_percentiles() -> None:
    assert Distribution().summary_ms() == {"count": 0}
    assert math.isnan(Distribution().quantile(0.5))
    assert Distribution().histogram(5) == []


def test_zero_is_a_value() -> None:
    assert of([0.0, 0.0, 1.0]).quantile(0.5) == pytest.approx(0, abs=1e-8)


def test_memory_does_not_grow_with_the_number_of_values() -> None:
    source = random.Random(0)
    distribution = Distribution()
    for _ in range(50_000):
        distribution.add(10 ** source.uniform(-6, 3))
    assert len(distribution._buckets) < 3000


def test_a_histogram_covers_every_value_once() -> None:
    bins = of([0.1] * 3 + [0.25] * 5 + [0.5]).histogram(4)
    assert [count for _, _, count in bins] == [3, 5, 0, 1]
    assert (bins[0][0], bins[-1][1]) == pytest.approx((0.1, 0.5))
    assert [count for _, _, count in of([0.1, 0.5]).histogram(4)] == [1, 1], "no more bins than values"
    assert of([0.2, 0.2]).histogram(4) == [(0.2, 0.2, 2)]


def finished(num_tokens: int) -> Finished:
    return Finished(
        index=0,
        finish_reason="length",
        stop_reason=None,
        usage=Usage(prompt_tokens=10, completion_tokens=num_tokens, cached_tokens=0),
        timing=Timing(0, 0, 0, 0, 0),
        speculation=SpeculationStats(1, 4, 3),
    )


def test_latencies_count_from_the_scheduled_send_and_not_the_real_one() -> None:
    timer = RequestTimer(scheduled_s=100.0)
    assert timer.message(1, 103.0) is None
    assert timer.ttft_s == 3.0
    assert timer.tpot_s is None
    assert timer.message(2, 104.0) == 1.0
    assert timer.message(2, 105.0) == 1.0
    assert timer.tpot_s == 0.5, "two seconds for the four tokens after the first message"


def test_a_burst_is_spread_over_its_gap() -> None:
    measurements = Measurements()
    measurements.record_gap(0.1, 1)
    measurements.record_gap(0.2, 4)
    assert measurements.message_gap.count == 2
    assert measurements.token_gap.count == 5
    assert measurements.token_gap.maximum == 0.1
    assert measurements.token_gap.minimum == pytest.approx(0.05)
    bursts = measurements.report(1.0)["bursts"]
    assert isinstance(bursts, dict)
    assert (bursts["messages"], bursts["tokens"]) == (1, 4)


@pytest.mark.parametrize(
    ("first_s", "last_s", "num_good"), [(0.5, 0.6, 1), (0.51, 0.6, 0), (0.5, 0.61, 0), (0.4, 0.4, 1)]
)
def test_goodput_needs_both_limits_met(first_s: float, last_s: float, num_good: int) -> None:
    measurements = Measurements(Goodput(ttft_s=0.5, tpot_s=0.1000001))
    timer = RequestTimer(0.0)
    timer.message(1, first_s)
    if last_s > first_s:
        timer.message(1, last_s)
    measurements.record_success(timer, finished(2), last_s)
    measurements.failures["UNAVAILABLE"] += 1
    goodput = measurements.report(2.0)["goodput"]
    assert isinstance(goodput, dict)
    assert goodput["requests"] == num_good
    assert goodput["share"] == num_good / 2, "a failed request is not good"
    assert goodput["requests_per_s"] == num_good / 2


def test_throughput_counts_tokens_over_the_run() -> None:
    measurements = Measurements()
    for _ in range(3):
        measurements.record_success(RequestTimer(0.0), finished(20), 1.0)
    report = measurements.report(2.0)
    assert report["throughput"] == {
        "requests_per_s": 1.5,
        "output_tokens_per_s": 30.0,
        "total_tokens_per_s": 45.0,
    }
    assert report["speculation"] == {"draft_tokens": 12, "accepted_tokens": 9, "acceptance_rate": 0.75}
    assert report["goodput"] is None
