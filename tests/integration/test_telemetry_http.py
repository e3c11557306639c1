"""The operator's HTTP port, scraped as Prometheus does."""

import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.config import ObservabilityConfig
from server.engine.protocol import EngineStatistics
from server.errors import ConfigError
from server.events import EventBus, StepFinished, TokensStreamed
from server.telemetry.pipeline import Telemetry
from tests.fakes.telemetry import STATISTICS, call_finished, engine_with, finished

STEPS = "outrider_speculation_steps_total"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(autouse=True)
def _a_scrape_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all that was published before it, however busy the machine is."""
    monkeypatch.setattr("server.telemetry.pipeline._SCRAPE_WAIT_S", 30.0)


@contextmanager
def running(
    bus: EventBus,
    *,
    statistics: EngineStatistics = STATISTICS,
    readiness: threading.Event | None = None,
    liveness: threading.Event | None = None,
    environ: dict[str, str] | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> Iterator[Telemetry]:
    """Telemetry with a metrics port; not given events count as set."""
    config = ObservabilityConfig(metrics_port=port, metrics_host=host)
    telemetry = Telemetry.start(
        config,
        engine_with(statistics),
        bus,
        readiness.is_set if readiness is not None else lambda: True,
        liveness.is_set if liveness is not None else lambda: True,
        environ or {},
    )
    try:
        yield telemetry
    finally:
        telemetry.shutdown(30)


def get(telemetry: Telemetry, path: str, *, host: str = "127.0.0.1") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{host}:{telemetry.metrics_port}{path}", timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(telemetry: Telemetry) -> Samples:
    status, page = get(telemetry, "/metrics")
    assert status == HTTPStatus.OK
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def labelled(samples: Samples, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """The samples of a metric by their labels."""
    return {labels: value for (of, labels), value in samples.items() if of == name}


def test_the_share_of_accepted_drafts_is_that_of_some() -> None:
    """From the start on it would say that drafts are bad, before there is one."""
    with running(EventBus(), statistics=EngineStatistics()) as telemetry:
        samples = scrape(telemetry)
    assert ("outrider_draft_acceptance_ratio", ()) not in samples
    assert samples["outrider_requests_running", ()] == 0


def test_gauges_and_counters_are_the_engines_own_under_their_exact_names() -> None:
    with running(EventBus()) as telemetry:
        samples = scrape(telemetry)
    expected = {
        "outrider_requests_running": 3,
        "outrider_requests_waiting": 2,
        "outrider_kv_blocks_free": 75,
        "outrider_kv_blocks_total": 100,
        "outrider_kv_usage_ratio": 0.25,
        "outrider_draft_acceptance_ratio": (70 + 40 + 10) / (90 + 60 + 30),
        "outrider_prefix_query_tokens_total": 1000,
        "outrider_prefix_hit_tokens_total": 640,
        "outrider_prompt_tokens_total": 2000,
        "outrider_generation_tokens_total": 500,
        "outrider_preemptions_total": 4,
        "outrider_steps_total": 321,
        "outrider_external_queried_tokens_total": 360,
        "outrider_external_loaded_tokens_total": 320,
        "outrider_failed_loads_total": 5,
        "outrider_unsaved_blocks_total": 6,
        "outrider_unreadable_handles_total": 10,
        "outrider_held_blocks": 7,
        "outrider_telemetry_dropped_events_total": 0,
    }
    assert {name: samples[name, ()] for name in expected} == expected
    for position, (drafted, accepted) in enumerate(((90, 70), (60, 40), (30, 10))):
        label = (("position", str(position)),)
        assert samples["outrider_draft_tokens_total", label] == drafted
        assert samples["outrider_accepted_draft_tokens_total", label] == accepted
    steps = {dict(labels)["num_speculative_tokens"]: count for labels, count in labelled(samples, STEPS).items()}
    assert steps == {"0": 200, "1": 0, "2": 21, "3": 100}
    failures = labelled(samples, "outrider_save_failures_total")
    assert failures == {(("reason", "full"),): 8, (("reason", "unavailable"),): 9}
    advice = (("change", "change_method"), ("problem", "slow_drafts"))
    assert labelled(samples, "outrider_speculation_advice") == {advice: 1}


def test_a_burst_is_spread_over_its_gap_and_labelled() -> None:
    bus = EventBus()
    with running(bus) as telemetry:
        bus.publish(TokensStreamed("r", 0, 1, None))
        bus.publish(TokensStreamed("r", 0, 1, 0.03))
        bus.publish(TokensStreamed("r", 0, 4, 0.04))
        samples = scrape(telemetry)
    name = "outrider_inter_token_gap_seconds"
    assert samples[f"{name}_count", (("burst", "false"),)] == 1
    assert samples[f"{name}_count", (("burst", "true"),)] == 4
    assert samples[f"{name}_sum", (("burst", "true"),)] == pytest.approx(0.04)
    assert samples[f"{name}_bucket", (("burst", "true"), ("le", "0.01"))] == 4
    assert samples[f"{name}_bucket", (("burst", "true"), ("le", "0.0075"))] == 0


def test_latencies_follow_the_semantic_conventions() -> None:
    bus = EventBus()
    with running(bus) as telemetry:
        bus.publish(StepFinished(0.004, 1, 1, 1, 0.0007))
        bus.publish(StepFinished(0.004, 1, 4, 2, 0, draft_s=0.00003, verify_s=0.003))
        bus.publish(call_finished(choices=(finished(0, queue_s=0.1), finished(1, queue_s=0.2))))
        bus.publish(call_finished(status="CANCELLED", choices=(finished(queue_s=0.3),)))
        bus.publish(call_finished(method="GetStats", duration_s=0.5))
        samples = scrape(telemetry)
    model = (
        ("gen_ai_operation_name", "text_completion"),
        ("gen_ai_provider_name", "outrider"),
        ("gen_ai_request_model", "tiny"),
    )
    first, per_token = "gen_ai_server_time_to_first_token_seconds", "gen_ai_server_time_per_output_token_seconds"
    assert samples[f"{first}_count", model] == 1, "one per successful call, not per choice"
    assert samples[f"{first}_sum", model] == pytest.approx(0.3)
    assert samples[f"{per_token}_count", model] == 2, "one per choice"
    assert samples[f"{per_token}_sum", model] == pytest.approx(0.2)
    for status in ("OK", "CANCELLED"):
        labels = (*model, ("rpc_response_status_code", status))
        assert samples["gen_ai_server_request_duration_seconds_count", labels] == 1
    assert samples["outrider_queue_time_seconds_count", ()] == 2
    assert samples["outrider_queue_time_seconds_sum", ()] == pytest.approx(0.4)
    assert samples["outrider_step_duration_seconds_count", ()] == 2
    for name, duration_s in (("draft", 0.00003), ("verify", 0.003)):
        assert samples[f"outrider_{name}_time_seconds_count", ()] == 1, "of steps that did"
        assert samples[f"outrider_{name}_time_seconds_sum", ()] == duration_s
    assert samples["outrider_step_lock_wait_seconds_sum", ()] == 0.0007
    stats = (
        ("rpc_method", "outrider.v1.Inference/GetStats"),
        ("rpc_response_status_code", "OK"),
        ("rpc_system_name", "grpc"),
    )
    assert samples["rpc_server_call_duration_seconds_sum", stats] == pytest.approx(0.5)


def test_health_and_readiness_follow_the_server() -> None:
    ready, alive = threading.Event(), threading.Event()
    with running(EventBus(), readiness=ready, liveness=alive) as telemetry:
        assert get(telemetry, "/readyz")[0] == HTTPStatus.SERVICE_UNAVAILABLE
        assert get(telemetry, "/healthz")[0] == HTTPStatus.SERVICE_UNAVAILABLE
        ready.set()
        alive.set()
        assert get(telemetry, "/readyz") == (HTTPStatus.OK, "ready\n")
        assert get(telemetry, "/healthz?verbose") == (HTTPStatus.OK, "alive\n")
        ready.clear()
        assert get(telemetry, "/readyz")[0] == HTTPStatus.SERVICE_UNAVAILABLE
        assert get(telemetry, "/nothing")[0] == HTTPStatus.NOT_FOUND


def test_a_silent_client_does_not_hold_up_the_others() -> None:
    with running(EventBus()) as telemetry, socket.create_connection(("127.0.0.1", telemetry.metrics_port or 0)):
        assert get(telemetry, "/healthz")[0] == HTTPStatus.OK


def test_two_servers_live_in_one_process() -> None:
    first_bus, second_bus = EventBus(), EventBus()
    with running(first_bus) as first, running(second_bus) as second:
        first_bus.publish(StepFinished(0.004, 1, 1, 1, 0.0007))
        assert scrape(first)["outrider_step_duration_seconds_count", ()] == 1
        assert ("outrider_step_duration_seconds_count", ()) not in scrape(second)


def test_a_port_in_use_is_a_config_error() -> None:
    with running(EventBus()) as telemetry, pytest.raises(ConfigError, match="choose another port"):
        running(EventBus(), port=telemetry.metrics_port or 0).__enter__()


def test_a_disabled_sdk_leaves_health_alone() -> None:
    with running(EventBus(), environ={"OTEL_SDK_DISABLED": "true"}) as telemetry:
        assert get(telemetry, "/healthz")[0] == HTTPStatus.OK
        assert get(telemetry, "/metrics") == (
            HTTPStatus.NOT_FOUND,
            "metrics are turned off by OTEL_SDK_DISABLED\n",
        )


def test_without_settings_nothing_is_imported_subscribed_or_opened() -> None:
    program = """
import sys
from server.config import ObservabilityConfig
from server.events import EventBus
from server.telemetry.pipeline import Telemetry
class Bus(EventBus):
    def subscribe(self, subscriber): raise AssertionError("nothing listens")
telemetry = Telemetry.start(ObservabilityConfig(), None, Bus(), lambda: True, lambda: True, {})
assert telemetry.metrics_port is None
telemetry.shutdown(1)
print([name for name in sys.modules if name.split(".")[0] in ("opentelemetry", "prometheus_client")])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
