"""A real OTLP/gRPC collector on a free port, in the test process."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps what it was sent. `endpoint` is bare host:port."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[Span] = []
        self.metrics: dict[str, Metric] = {}
        self.resource: dict[str, object] = {}
        self.headers: dict[str, str] = {}

    def Export(self, request: object, context: grpc.ServicerContext) -> object:  # noqa: N802 - gRPC's name for it
        """Both services name their one method so."""
        self.headers |= {key: str(value) for key, value in context.invocation_metadata()}
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            for resource_spans in request.resource_spans:
                self.resource = attributes(resource_spans.resource.attributes)
                for scope_spans in resource_spans.scope_spans:
                    self.spans.extend(scope_spans.spans)
            return trace_service_pb2.ExportTraceServiceResponse()
        assert isinstance(request, metrics_service_pb2.ExportMetricsServiceRequest)
        for resource_metrics in request.resource_metrics:
            for scope_metrics in resource_metrics.scope_metrics:
                self.metrics |= {metric.name: metric for metric in scope_metrics.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def server_spans(self) -> list[Span]:
        """The spans of calls, without their children."""
        return [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]

    def children(self, parent: Span) -> dict[str, Span]:
        """The spans right below one, by name."""
        return {span.name: span for span in self.spans if span.parent_span_id == parent.span_id}


def attributes(pairs: Iterable[KeyValue]) -> dict[str, object]:
    """OTLP's key-value pairs as a dict of plain values."""
    return {pair.key: _plain(pair.value) for pair in pairs}


def _plain(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind) if kind is not None else None


@contextmanager
def running_receiver() -> Iterator[OtlpReceiver]:
    """A receiver that listens until the block is left."""
    receiver = OtlpReceiver()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    receiver.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(grace=None).wait()
