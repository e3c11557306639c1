"""Spans as a real OTLP collector receives them."""

import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from server.config import ObservabilityConfig
from server.engine.protocol import FinishReason
from server.events import EventBus
from server.telemetry.pipeline import Telemetry
from tests.fakes.otlp_receiver import OtlpReceiver, attributes, running_receiver
from tests.fakes.telemetry import call_finished, engine_with, finished

SPECULATION = {
    "outrider.speculation.steps": 4,
    "outrider.speculation.draft_tokens": 12,
    "outrider.speculation.accepted_tokens": 5,
    "outrider.speculation.mean_acceptance_length": 1 + 5 / 4,
    "outrider.speculation.draft_acceptance_rate": 5 / 12,
    "outrider.speculation.num_speculative_tokens": 3,
}
"""What spans say of one choice of tests.fakes.telemetry."""


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with running_receiver() as running:
        yield running


def start(bus: EventBus, endpoint: str | None, environ: Mapping[str, str] | None = None) -> Telemetry:
    config = ObservabilityConfig(otlp_endpoint=endpoint)
    return Telemetry.start(config, engine_with(), bus, lambda: True, lambda: True, environ or {})


def test_a_generation_is_a_server_span_under_its_caller_with_its_phases_below(receiver: OtlpReceiver) -> None:
    bus = EventBus()
    telemetry = start(bus, receiver.endpoint)
    call = call_finished(
        metadata={"Traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "TraceState": "vendor=x,other=y"},
        choices=(finished(),),
        attributes={"gen_ai.request.temperature": 0.5, "server.port": 50051},
    )
    bus.publish(call)
    telemetry.shutdown(30)

    [span] = receiver.server_spans()
    assert span.name == "outrider.v1.Inference/Generate"
    assert (span.trace_id, span.parent_span_id) == (b"\xab" * 16, b"\xcd" * 8)
    assert span.trace_state == "vendor=x,other=y"
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (call.start_unix_ns, call.end_unix_ns)
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert attributes(span.attributes) == {
        "rpc.system.name": "grpc",
        "rpc.method": "outrider.v1.Inference/Generate",
        "rpc.response.status_code": "OK",
        "rpc.system": "grpc",
        "rpc.service": "outrider.v1.Inference",
        "rpc.grpc.status_code": 0,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": "req-1",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 16,
        **SPECULATION,
        "server.port": 50051,
    }

    children = receiver.children(span)
    bounds_ms = {
        name: [(ns - call.start_unix_ns) // 1_000_000 for ns in (c.start_time_unix_nano, c.end_time_unix_nano)]
        for name, c in children.items()
    }
    assert bounds_ms == {"queue": [0, 100], "prefill": [100, 300], "decode": [300, 1200]}
    decode = attributes(children["decode"].attributes)
    assert {name: value for name, value in decode.items() if name.startswith("outrider.speculation.")} == {
        **SPECULATION,
        "outrider.speculation.acceptance_histogram": [1, 2, 0, 1],
        "outrider.speculation.draft_seconds": 0.125,
        "outrider.speculation.verify_seconds": 0.5,
    }
    assert receiver.resource["service.name"] == "outrider"


@pytest.mark.parametrize(
    ("status", "is_error", "cancel_reason"),
    [
        ("OK", False, None),
        ("CANCELLED", False, "client"),
        ("DEADLINE_EXCEEDED", True, "deadline"),
        ("INVALID_ARGUMENT", False, None),
        ("RESOURCE_EXHAUSTED", False, None),
        ("ALREADY_EXISTS", False, None),
        ("UNAVAILABLE", True, None),
        ("INTERNAL", True, None),
    ],
)
def test_every_outcome_is_one_ended_span(
    receiver: OtlpReceiver, status: str, is_error: bool, cancel_reason: str | None
) -> None:
    bus = EventBus()
    telemetry = start(bus, f"http://{receiver.endpoint}")
    bus.publish(call_finished(status=status, error="" if status == "OK" else "what went wrong"))
    telemetry.shutdown(30)

    [span] = receiver.spans
    assert span.end_time_unix_nano > span.start_time_unix_nano
    assert span.parent_span_id == b""
    assert (span.status.code == Status.STATUS_CODE_ERROR) == is_error
    assert span.status.message == ("what went wrong" if is_error else "")
    described = attributes(span.attributes)
    assert described["rpc.response.status_code"] == status
    assert described.get("error.type") == (status if is_error else None)
    assert described.get("outrider.cancel.reason") == cancel_reason


def test_phases_that_were_never_reached_have_no_span_and_none_outlasts_the_call(receiver: OtlpReceiver) -> None:
    bus = EventBus()
    telemetry = start(bus, receiver.endpoint)
    choices = (
        finished(0, queue_s=0.5, prefill_s=0, decode_s=0, finish_reason=FinishReason.ABORT),
        finished(1, queue_s=0.5, prefill_s=0.1, decode_s=7.0),
    )
    bus.publish(call_finished(choices=choices, duration_s=1.0))
    telemetry.shutdown(30)

    [parent] = receiver.server_spans()
    phases = [(attributes(s.attributes)["outrider.choice.index"], s.name) for s in receiver.spans if s is not parent]
    assert phases == [(0, "queue"), (1, "queue"), (1, "prefill"), (1, "decode")]
    assert max(span.end_time_unix_nano for span in receiver.spans) == parent.end_time_unix_nano


def test_the_call_tells_of_all_its_choices(receiver: OtlpReceiver) -> None:
    bus = EventBus()
    telemetry = start(bus, receiver.endpoint)
    bus.publish(call_finished(choices=(finished(0), finished(1))))
    telemetry.shutdown(30)
    [span] = receiver.server_spans()
    described = attributes(span.attributes)
    assert {name: described[name] for name in SPECULATION} == {
        **SPECULATION,
        "outrider.speculation.steps": 8,
        "outrider.speculation.draft_tokens": 24,
        "outrider.speculation.accepted_tokens": 10,
    }


def test_fifty_concurrent_calls_keep_their_own_parents(receiver: OtlpReceiver) -> None:
    bus = EventBus()
    telemetry = start(bus, receiver.endpoint)
    together = threading.Barrier(50)

    def call(number: int) -> None:
        metadata = {"traceparent": f"00-{number:032x}-{number + 1000:016x}-01", "tracestate": f"caller={number}"}
        together.wait()
        bus.publish(call_finished(metadata=metadata, choices=(finished(),), request_id=str(number)))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(1, 51)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    telemetry.shutdown(30)

    spans = receiver.server_spans()
    assert len(spans) == 50
    for span in spans:
        number = int(str(attributes(span.attributes)["gen_ai.response.id"]))
        assert int.from_bytes(span.trace_id, "big") == number
        assert int.from_bytes(span.parent_span_id, "big") == number + 1000
        assert span.trace_state == f"caller={number}"
        assert set(receiver.children(span)) == {"queue", "prefill", "decode"}
        assert all(child.trace_id == span.trace_id for child in receiver.children(span).values())


def test_the_callers_decision_not_to_sample_is_kept(receiver: OtlpReceiver) -> None:
    bus = EventBus()
    telemetry = start(bus, receiver.endpoint)
    bus.publish(call_finished(metadata={"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-00"}, choices=(finished(),)))
    telemetry.shutdown(30)
    assert receiver.spans == []


def test_the_environment_alone_is_enough(receiver: OtlpReceiver) -> None:
    bus = EventBus()
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{receiver.endpoint}",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=blue",
        "OTEL_SERVICE_NAME": "chat-backend",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test%20bed,service.name=ignored",
    }
    telemetry = start(bus, None, environ)
    bus.publish(call_finished(method="GetStats"))
    telemetry.shutdown(30)
    assert [span.name for span in receiver.spans] == ["outrider.v1.Inference/GetStats"]
    assert "gen_ai.operation.name" not in attributes(receiver.spans[0].attributes)
    assert receiver.resource["service.name"] == "chat-backend"
    assert receiver.resource["deployment.environment.name"] == "test bed"
    assert receiver.headers["x-tenant"] == "blue"
    assert "outrider_requests_running" in receiver.metrics


@pytest.mark.parametrize(
    "environ",
    [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_SAMPLER": "always_off"}, {"OTEL_TRACES_EXPORTER": "none"}],
)
def test_the_environment_can_turn_traces_off(receiver: OtlpReceiver, environ: Mapping[str, str]) -> None:
    bus = EventBus()
    telemetry = start(bus, receiver.endpoint, environ)
    bus.publish(call_finished())
    telemetry.shutdown(30)
    assert receiver.spans == []
    assert bool(receiver.metrics) == ("OTEL_SDK_DISABLED" not in environ)


@pytest.mark.parametrize("is_listening", [False, True], ids=["refuses", "never answers"])
def test_a_dead_collector_costs_a_log_line_and_no_time(is_listening: bool, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as collector:
        collector.bind(("127.0.0.1", 0))
        if is_listening:
            collector.listen()
        bus = EventBus()
        telemetry = start(bus, f"127.0.0.1:{collector.getsockname()[1]}")
        event = call_finished(choices=(finished(),))
        started_s = time.thread_time()
        for _ in range(2000):
            bus.publish(event)
        publish_s = time.thread_time() - started_s
        started_s = time.perf_counter()
        with caplog.at_level(logging.WARNING):
            telemetry.shutdown(0.5)
        shutdown_s = time.perf_counter() - started_s
    assert publish_s < 0.5  # 250 us per event, hundreds of times what one append takes
    assert shutdown_s < 10  # the exporter's own timeout
    assert sum(record.name.startswith("opentelemetry.") for record in caplog.records) == 1, caplog.text
    assert "the collector did not take everything within 0.5 s" in caplog.text


def test_waiting_for_kv_from_another_node_is_a_phase_of_its_own(receiver: OtlpReceiver) -> None:
    bus = EventBus()
    telemetry = start(bus, receiver.endpoint)
    timing = replace(finished().timing, transfer_s=0.03)
    call = call_finished(choices=(replace(finished(), timing=timing),))
    bus.publish(call)
    telemetry.shutdown(30)

    [span] = receiver.server_spans()
    ends_ms = {
        name: (child.end_time_unix_nano - call.start_unix_ns) // 1_000_000
        for name, child in receiver.children(span).items()
    }
    assert ends_ms == {"queue": 70, "transfer": 100, "prefill": 300, "decode": 1200}
