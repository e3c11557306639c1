"""Builds telemetry from its settings, and takes it down within a bound.

Nothing is global: each server has a TracerProvider and a MeterProvider of its own, so
many live in one process. OpenTelemetry is imported only where something asks for it.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from server.config import ObservabilityConfig
from server.engine.protocol import Engine
from server.events import EventBus
from server.telemetry.event_queue import EventQueue
from server.telemetry.http import OperatorPort

_logger = logging.getLogger(__name__)

_SCRAPE_WAIT_S = 0.5
_INTERRUPT_WAIT_S = 0.5
_ABANDON_TIMEOUT_S = 1.0


class Telemetry:
    """Spans and metrics of one server, from start() to shutdown()."""

    def __init__(self) -> None:
        self._events: EventQueue | None = None
        self._operator_port: OperatorPort | None = None
        self._flushes: list[Callable[[], None]] = []
        self._interrupts: list[Callable[[], None]] = []
        self._after = ExitStack()

    @classmethod
    def start(
        cls,
        config: ObservabilityConfig,
        engine: Engine,
        bus: EventBus,
        readiness: Callable[[], bool],
        liveness: Callable[[], bool],
        environ: Mapping[str, str],
    ) -> "Telemetry":
        """Subscribe to the bus and start exporting; without endpoint and port this does nothing.

        Args:
            engine: its model is loaded; statistics() is called on threads of ours.
            readiness: whether new requests are served; called on threads of ours.
            liveness: whether process and step thread can go on; likewise.
        Raises: ConfigError on a setting or variable that cannot be followed, or a port in use.
        """
        telemetry = cls()
        try:
            exposition = telemetry._start_signals(config, engine, bus, environ)
            if config.metrics_port is not None:
                telemetry._operator_port = OperatorPort(
                    config.metrics_host,
                    config.metrics_port,
                    liveness=liveness,
                    readiness=readiness,
                    exposition=exposition,
                )
        except BaseException:
            telemetry.shutdown(_ABANDON_TIMEOUT_S)
            raise
        return telemetry

    @property
    def metrics_port(self) -> int | None:
        """The HTTP port that is listened on, or None."""
        return self._operator_port.port if self._operator_port is not None else None

    def shutdown(self, timeout_s: float) -> None:
        """Export what is left and stop; blocks for at most `timeout_s` and a moment.

        A collector that does not answer loses what it was not told by then.
        """
        deadline_s = time.monotonic() + timeout_s
        if self._events is not None:
            self._events.close(timeout_s)
        threads = [threading.Thread(target=flush, name="telemetry-flush", daemon=True) for flush in self._flushes]
        for thread in threads:
            thread.start()
        _join(threads, deadline_s)
        if any(thread.is_alive() for thread in threads):
            _logger.warning("the collector did not take everything within %g s; the rest is lost", timeout_s)
            for interrupt in self._interrupts:
                interrupt()
            _join(threads, time.monotonic() + _INTERRUPT_WAIT_S)
        if self._operator_port is not None:
            self._operator_port.close()
        self._after.close()

    def _start_signals(
        self, config: ObservabilityConfig, engine: Engine, bus: EventBus, environ: Mapping[str, str]
    ) -> Callable[[str], tuple[bytes, str]] | None:
        """Build the wanted providers, subscribe, and return what answers a scrape."""
        has_endpoint = config.otlp_endpoint is not None or any(
            name.startswith("OTEL_EXPORTER_OTLP_") and name.endswith("ENDPOINT") and value
            for name, value in environ.items()
        )
        if not has_endpoint and config.metrics_port is None:
            return None
        # Imported here, so that a server without telemetry does not pay for OpenTelemetry.
        from server.telemetry import otlp
        from server.telemetry.engine_metrics import count_dropped_events
        from server.telemetry.providers import Providers

        if otlp.is_sdk_disabled(environ):
            return None
        providers = Providers.build(
            traces=otlp.resolve_target("traces", config.otlp_endpoint, environ),
            metrics=otlp.resolve_target("metrics", config.otlp_endpoint, environ),
            with_prometheus=config.metrics_port is not None,
            engine=engine,
            environ=environ,
        )
        self._after.enter_context(otlp.quiet_export_log())
        self._flushes = providers.flushes
        self._interrupts = providers.interrupts
        if not providers.subscribers:
            return None
        self._events = events = EventQueue(providers.subscribers)
        bus.subscribe(events.put_nowait)
        if providers.meter is not None:
            count_dropped_events(providers.meter, lambda: events.num_dropped)
        collector = providers.prometheus
        if collector is None:
            return None

        def exposition(accept: str) -> tuple[bytes, str]:
            events.wait_processed(_SCRAPE_WAIT_S)  # a scrape shows what happened before it
            return collector.exposition(accept)

        return exposition


def _join(threads: Sequence[threading.Thread], deadline_s: float) -> None:
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
