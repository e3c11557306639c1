"""How the flag and the OTEL_* variables become exporter settings."""

from collections.abc import Mapping

import pytest
from opentelemetry.sdk.trace import sampling

from server.errors import ConfigError
from server.telemetry.otlp import OtlpTarget, make_sampler, resolve_target


@pytest.mark.parametrize(
    ("endpoint", "environ", "insecure"),
    [
        ("localhost:4317", {}, True),
        ("localhost:4317", {"OTEL_EXPORTER_OTLP_INSECURE": "false"}, False),
        ("http://localhost:4317", {"OTEL_EXPORTER_OTLP_INSECURE": "false"}, True),
        ("https://collector:4317", {}, False),
        ("https://collector:4317", {"OTEL_EXPORTER_OTLP_INSECURE": "true"}, False),
    ],
)
def test_tls_follows_the_scheme_and_is_off_without_one(
    endpoint: str, environ: Mapping[str, str], insecure: bool
) -> None:
    assert resolve_target("traces", endpoint, environ) == OtlpTarget(endpoint=endpoint, insecure=insecure)


def test_the_flag_goes_before_a_signals_variable_and_that_before_the_common_one() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://common:1",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://traces:1",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "3",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "a=1,b=two%20words",
    }

    def endpoint(signal: str, flag: str | None) -> str:
        target = resolve_target(signal, flag, environ)
        assert target is not None
        assert target.timeout_s == 3
        assert target.headers == ({"a": "1", "b": "two words"} if signal == "traces" else {})
        return target.endpoint

    assert endpoint("traces", "http://flag:1") == "http://flag:1"
    assert endpoint("traces", None) == "http://traces:1"
    assert endpoint("metrics", None) == "http://common:1"


@pytest.mark.parametrize("environ", [{}, {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1"}])
def test_nothing_is_exported_unasked(environ: Mapping[str, str]) -> None:
    assert resolve_target("traces", None, environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER: must be otlp or none, got 'zipkin'"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            "only grpc",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1", "OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "number of seconds"),
    ],
)
def test_what_cannot_be_followed_is_refused(environ: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_target("traces", None, environ)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, sampling.DEFAULT_ON),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, sampling.ALWAYS_OFF),
        (
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"},
            sampling.TraceIdRatioBased(0.25),
        ),
        (
            {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"},
            sampling.ParentBasedTraceIdRatio(0.5),
        ),
    ],
)
def test_samplers_by_their_standard_names(environ: Mapping[str, str], expected: sampling.Sampler) -> None:
    described: list[str] = [sampler.get_description() for sampler in (make_sampler(environ), expected)]
    assert described[0] == described[1]


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_TRACES_SAMPLER": "sometimes"},
        {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"},
        {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "half"},
    ],
)
def test_unknown_samplers_are_refused(environ: Mapping[str, str]) -> None:
    with pytest.raises(ConfigError, match="OTEL_TRACES_SAMPLER"):
        make_sampler(environ)
