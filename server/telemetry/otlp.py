"""Where and how spans and metrics are exported: --otlp-endpoint and the OTEL_* variables.

What is decided here is read from the mapping that is passed in. The SDK itself reads
OTEL_BSP_*, OTEL_SPAN_*, OTEL_METRIC_EXPORT_*, the exporters' certificates and their
compression from the process's environment.
"""

import logging
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import sampling
from opentelemetry.util.re import parse_env_headers

from server.errors import ConfigError
from server.version import VERSION

_SERVICE_NAME = "outrider"
_EXPORT_LOGGERS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")
_LOG_INTERVAL_S = 60.0


@dataclass(frozen=True, kw_only=True)
class OtlpTarget:
    """The collector of one signal. `timeout_s` None is the exporter's own, 10 s."""

    endpoint: str
    insecure: bool
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None


def is_sdk_disabled(environ: Mapping[str, str]) -> bool:
    """Whether OTEL_SDK_DISABLED turns every signal off."""
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def resolve_target(signal: str, endpoint: str | None, environ: Mapping[str, str]) -> OtlpTarget | None:
    """The collector of "traces" or "metrics", or None where nothing asks for export.

    Args:
        endpoint: from the flag; goes before the environment's. A scheme of http, or none, means no TLS.
    Raises: ConfigError on a variable that asks for what this server cannot do.
    """

    def variable(name: str) -> str:
        specific = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}", "")
        return specific or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")

    exporter = environ.get(f"OTEL_{signal.upper()}_EXPORTER", "") or "otlp"
    if exporter not in ("otlp", "none"):
        raise ConfigError(f"OTEL_{signal.upper()}_EXPORTER: must be otlp or none, got {exporter!r}")
    chosen = endpoint or variable("ENDPOINT")
    if not chosen or exporter == "none":
        return None
    protocol = variable("PROTOCOL")
    if endpoint is None and protocol not in ("", "grpc"):
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL: only grpc is spoken here, got {protocol!r}")
    timeout = variable("TIMEOUT")
    try:
        timeout_s = float(timeout) if timeout else None
    except ValueError as error:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_TIMEOUT: must be a number of seconds, got {timeout!r}") from error
    return OtlpTarget(
        endpoint=chosen,
        insecure=_is_insecure(chosen, variable("INSECURE")),
        headers=parse_env_headers(variable("HEADERS"), liberal=True),
        timeout_s=timeout_s,
    )


def _is_insecure(endpoint: str, wish: str) -> bool:
    if "://" in endpoint:
        return not endpoint.startswith("https://")
    return wish.strip().lower() != "false"


def make_resource(environ: Mapping[str, str]) -> Resource:
    """Who we are: service name and version, a fresh instance id, and what OTEL_RESOURCE_ATTRIBUTES adds."""
    attributes = {
        "service.name": _SERVICE_NAME,
        "service.version": VERSION,
        "service.instance.id": str(uuid.uuid4()),
    }
    for item in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        key, separator, value = item.partition("=")
        if separator:
            attributes[key.strip()] = unquote(value.strip())
    if name := environ.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = name
    return Resource.create(attributes)


def make_sampler(environ: Mapping[str, str]) -> sampling.Sampler:
    """OTEL_TRACES_SAMPLER and its argument; by default whatever the caller decided, else everything.

    Raises: ConfigError on an unknown sampler or a ratio out of range.
    """
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
    base = name.removeprefix("parentbased_")
    argument = environ.get("OTEL_TRACES_SAMPLER_ARG", "") or "1.0"
    root: sampling.Sampler
    match base:
        case "always_on":
            root = sampling.ALWAYS_ON
        case "always_off":
            root = sampling.ALWAYS_OFF
        case "traceidratio":
            try:
                root = sampling.TraceIdRatioBased(float(argument))
            except ValueError as error:
                raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG: must be from 0 to 1, got {argument!r}") from error
        case _:
            raise ConfigError(
                "OTEL_TRACES_SAMPLER: must be always_on, always_off or traceidratio, "
                f"or one of them after parentbased_, got {name!r}"
            )
    return sampling.ParentBased(root) if name != base else root


@contextmanager
def quiet_export_log() -> Iterator[None]:
    """Let the exporters say once a minute that the collector is away, not at every attempt."""
    limit = _RateLimit()
    loggers = [logging.getLogger(name) for name in _EXPORT_LOGGERS]
    for logger in loggers:
        logger.addFilter(limit)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(limit)


class _RateLimit(logging.Filter):
    """Passes one record per interval, whatever it says."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        with self._lock:
            now_s = time.monotonic()
            if now_s < self._next_s:
                return False
            self._next_s = now_s + _LOG_INTERVAL_S
            return True
