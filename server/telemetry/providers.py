"""The OpenTelemetry objects of one server, wired to their exporters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from server.engine.protocol import Engine
from server.events import Event
from server.telemetry.call_attributes import SCOPE
from server.telemetry.engine_metrics import observe_engine
from server.telemetry.event_metrics import EventMetrics
from server.telemetry.otlp import OtlpTarget, make_resource, make_sampler
from server.telemetry.prometheus import PrometheusCollector
from server.telemetry.tracing import CallTracer


@dataclass
class Providers:
    """What was built.

    Attributes:
        subscribers: take events, on one thread.
        flushes: each exports what is left of one signal and stops it; may block as long as its collector does.
        interrupts: make the flushes give up.
        meter: None where nobody wants metrics.
        prometheus: None without a metrics port.
    """

    subscribers: list[Callable[[Event], None]] = field(default_factory=list)
    flushes: list[Callable[[], None]] = field(default_factory=list)
    interrupts: list[Callable[[], None]] = field(default_factory=list)
    meter: Meter | None = None
    prometheus: PrometheusCollector | None = None

    @classmethod
    def build(
        cls,
        *,
        traces: OtlpTarget | None,
        metrics: OtlpTarget | None,
        with_prometheus: bool,
        engine: Engine,
        environ: Mapping[str, str],
    ) -> "Providers":
        """Connect the signals that have a target; exporting threads run from here on.

        Raises: ConfigError on a sampler that does not exist.
        """
        built = cls()
        resource = make_resource(environ)
        if traces is not None:
            built._add_traces(traces, resource, engine, environ)
        if metrics is not None or with_prometheus:
            built._add_metrics(metrics, resource, engine, with_prometheus)
        return built

    def _add_traces(self, target: OtlpTarget, resource: Resource, engine: Engine, environ: Mapping[str, str]) -> None:
        sampler = make_sampler(environ)
        exporter = OTLPSpanExporter(
            endpoint=target.endpoint,
            insecure=target.insecure,
            headers=dict(target.headers),
            timeout=target.timeout_s,
        )
        provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self.subscribers.append(CallTracer(provider.get_tracer(SCOPE), engine.model_info.served_model_name))
        self.flushes.append(provider.shutdown)
        self.interrupts.append(exporter.shutdown)

    def _add_metrics(
        self, target: OtlpTarget | None, resource: Resource, engine: Engine, with_prometheus: bool
    ) -> None:
        readers: list[MetricReader] = []
        if target is not None:
            exporter = OTLPMetricExporter(
                endpoint=target.endpoint,
                insecure=target.insecure,
                headers=dict(target.headers),
                timeout=target.timeout_s,
            )
            readers.append(PeriodicExportingMetricReader(exporter))
            self.interrupts.append(exporter.shutdown)
        if with_prometheus:
            self.prometheus = PrometheusCollector(resource)
            readers.append(self.prometheus.reader)
        provider = MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)
        self.meter = provider.get_meter(SCOPE)
        observe_engine(self.meter, engine.statistics)
        self.subscribers.append(EventMetrics(self.meter, engine.model_info.served_model_name))
        self.flushes.append(provider.shutdown)
