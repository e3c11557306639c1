"""Where other nodes come for blocks: a port, and a thread for each connection."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from connectors.peer.address import PeerAddress
from connectors.peer.leases import LeaseTable
from connectors.peer.sweeper import LEAST_S
from connectors.rare_log import RareLog
from connectors.tcp.blocks import LocalBlocks
from connectors.tcp.connection import Connection
from connectors.tcp.serving import Serving
from server.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
_BACKLOG = 128
_ANY = ("0.0.0.0", "::", "")


class TcpServer:
    """Listens from the start, answers once it has blocks.

    Anybody who reaches the port may connect; blocks are given to whoever names a lease of them.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        advertised_host: str | None,
        engine_id: str,
        clock: Callable[[], float],
        timeout_s: float,
    ) -> None:
        """Args: port: 0 for any. Raises: ConfigError if the address can not be had."""
        self._engine_id = engine_id
        self._clock = clock
        self._timeout_s = timeout_s
        self._log = RareLog(logger, clock)
        try:
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self._listener = socket.create_server(found[4][:2], family=found[0], backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"KV can not be served at {host}:{port}: {error}") from error
        own_host = socket.gethostname() if host in _ANY else host
        self.address = str(PeerAddress(advertised_host or own_host, self._listener.getsockname()[1]))
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, Connection] = {}
        self._is_closed = False
        self._accepting: threading.Thread | None = None

    def start(self, blocks: LocalBlocks, leases: LeaseTable) -> None:
        """Answer whoever comes, and those who have come already."""
        self._accepting = threading.Thread(
            target=self._accept, args=(blocks, leases), name="outrider-tcp-accept", daemon=True
        )
        self._accepting.start()

    def _accept(self, blocks: LocalBlocks, leases: LeaseTable) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    self._log.warning("accept", "a connection for KV was not accepted: %s", error)
                    time.sleep(0.05)  # out of file descriptors, most likely: do not spin
                continue
            connection = Connection(sock, self._clock)
            serving = Serving(
                connection, self._engine_id, blocks, leases, self._clock, timeout_s=self._timeout_s, log=self._log
            )
            thread = threading.Thread(target=self._serve, args=(serving,), name="outrider-tcp-serve", daemon=True)
            with self._lock:
                has_room = len(self._connections) < MAX_CONNECTIONS and not self._is_closed
                if has_room:
                    self._connections[thread] = connection
                    thread.start()
            if not has_room:
                self._log.warning("full", "more than %d connections for KV: one was closed", MAX_CONNECTIONS)
                connection.close()

    def _serve(self, serving: Serving) -> None:
        try:
            serving.run()
        except Exception:
            logger.exception("serving KV failed")
        finally:
            with self._lock:
                self._connections.pop(threading.current_thread(), None)

    def close(self, timeout_s: float) -> None:
        """Close the port and all connections, and end their threads; may be called twice."""
        until_s = time.monotonic() + max(timeout_s, LEAST_S)
        with self._lock:
            self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # the thread that accepts wakes, and can not accept any more
        if self._accepting is not None:
            self._accepting.join(max(0.0, until_s - time.monotonic()))
        # Not before: the thread may be about to accept, and would wait at whatever has the number of the socket then.
        self._listener.close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections.values():
            connection.stop()
        for thread in connections:
            thread.join(max(0.0, until_s - time.monotonic()))
