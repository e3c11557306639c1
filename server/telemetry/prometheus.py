"""The SDK's metrics in Prometheus' text format.

Ours instead of opentelemetry-exporter-prometheus: that one registers itself with the
process-wide registry (so two servers in one process collide) and is still a beta. The
text itself is prometheus_client's work.
"""

import re
from collections.abc import Iterable, Sequence

from opentelemetry.sdk.metrics.export import (
    Histogram,
    HistogramDataPoint,
    InMemoryMetricReader,
    Metric,
    NumberDataPoint,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]+")
_UNIT_SUFFIXES = {"s": "_seconds", "By": "_bytes", "1": "_ratio"}


class PrometheusCollector(Collector):
    """Collects from one MeterProvider through a reader of its own; any thread may call."""

    def __init__(self, resource: Resource) -> None:
        self.reader = InMemoryMetricReader()
        self._resource = resource

    def collect(self) -> Iterable[Family]:
        """The metrics as they are now."""
        target = InfoMetricFamily("target", "The server that was scraped.")
        target.add_metric([], {_name(key): str(value) for key, value in self._resource.attributes.items()})
        yield target
        data = self.reader.get_metrics_data()
        for resource_metrics in data.resource_metrics if data is not None else ():
            for scope_metrics in resource_metrics.scope_metrics:
                for metric in scope_metrics.metrics:
                    yield _family(metric)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The whole page in the format that the Accept header asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self), content_type


def _family(metric: Metric) -> Family:
    """One metric with all its label sets; a label that only some have is empty in the others."""
    points: Sequence[NumberDataPoint | HistogramDataPoint] = metric.data.data_points  # type: ignore[assignment]
    name = _name(metric.name)
    suffix = _UNIT_SUFFIXES.get(metric.unit or "", "")
    name = name if name.endswith(suffix) else name + suffix
    keys = sorted({key for point in points for key in point.attributes or {}})
    labels = [_name(key) for key in keys]
    help_text = metric.description or ""
    if isinstance(metric.data, Histogram):
        histogram = HistogramMetricFamily(name, help_text, labels=labels)
        for point in points:
            assert isinstance(point, HistogramDataPoint)
            histogram.add_metric(_label_values(point, keys), _buckets(point), point.sum)
        return histogram
    is_counter = isinstance(metric.data, Sum) and metric.data.is_monotonic
    numbers = (CounterMetricFamily if is_counter else GaugeMetricFamily)(name, help_text, labels=labels)
    for point in points:
        assert isinstance(point, NumberDataPoint)
        numbers.add_metric(_label_values(point, keys), point.value)
    return numbers


def _name(name: str) -> str:
    return _NOT_IN_A_NAME.sub("_", name)


def _label_values(point: NumberDataPoint | HistogramDataPoint, keys: Sequence[str]) -> list[str]:
    return [str((point.attributes or {}).get(key, "")) for key in keys]


def _buckets(point: HistogramDataPoint) -> list[tuple[str, float]]:
    """(upper bound, observations up to it), cumulative, as Prometheus wants them."""
    total = 0
    buckets: list[tuple[str, float]] = []
    bounds = (*map(str, point.explicit_bounds), "+Inf")
    for bound, count in zip(bounds, point.bucket_counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
