"""The HTTP port for operators: /metrics, /healthz, /readyz."""

import logging
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

from server.errors import ConfigError

_logger = logging.getLogger(__name__)

_TEXT = "text/plain; charset=utf-8"
_CLIENT_TIMEOUT_S = 10.0
_CLOSE_POLL_S = 0.1

Page = tuple[HTTPStatus, bytes, str]
Exposition = Callable[[str], tuple[bytes, str]]


class OperatorPort:
    """Serves on a daemon thread of its own and a thread per request, so it answers while the event loop is busy.

    The callables are called on those threads and must not block. Lives from start() to close().
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        liveness: Callable[[], bool],
        readiness: Callable[[], bool],
        exposition: Exposition | None,
    ) -> None:
        """Bind and start answering.

        Args:
            port: 0 picks a free one.
            exposition: takes the Accept header, returns body and content type; None answers 404.
        Raises: ConfigError if the address cannot be bound.
        """
        try:
            self._server = _Server(host, port, liveness, readiness, exposition)
        except OSError as error:
            raise ConfigError(f"metrics_port: cannot listen on {host}:{port}: {error}; choose another port") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_CLOSE_POLL_S,), name="operator-port", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is really listened on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening; returns within a fraction of a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        host: str,
        port: int,
        liveness: Callable[[], bool],
        readiness: Callable[[], bool],
        exposition: Exposition | None,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._liveness = liveness
        self._readiness = readiness
        self._exposition = exposition
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own looks the host's full name up, which can hang on a broken resolver.
        TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: tuple[str, int]) -> None:
        # socketserver's own prints a traceback on stderr whenever a scraper hangs up early.
        _logger.warning("could not answer %s", client_address[0], exc_info=True)  # noqa: LOG014 - called in a handler

    def page(self, path: str, accept: str) -> Page:
        match path:
            case "/healthz":
                return _verdict(self._liveness(), "alive", "the step thread is dead; restart the process")
            case "/readyz":
                return _verdict(self._readiness(), "ready", "not ready: starting or shutting down")
            case "/metrics" if self._exposition is not None:
                return (HTTPStatus.OK, *self._exposition(accept))
            case "/metrics":
                return HTTPStatus.NOT_FOUND, b"metrics are turned off by OTEL_SDK_DISABLED\n", _TEXT
        return HTTPStatus.NOT_FOUND, b"try /metrics, /healthz or /readyz\n", _TEXT


def _verdict(is_good: bool, good: str, bad: str) -> Page:
    if is_good:
        return HTTPStatus.OK, f"{good}\n".encode(), _TEXT
    return HTTPStatus.SERVICE_UNAVAILABLE, f"{bad}\n".encode(), _TEXT


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        status, body, content_type = self.server.page(self.path.partition("?")[0], self.headers.get("Accept", ""))
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        _logger.debug("%s: %s", self.address_string(), format % args)
