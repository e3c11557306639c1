"""The port that blocks are served at, and the end of its threads."""

import socket
import threading
import time
from contextlib import suppress
from typing import Any, cast

from connectors.peer.leases import LeaseTable
from connectors.tcp.server import TcpServer

BLOCKS = cast("Any", None)
"""Nobody gets as far as asking for any."""


def server() -> TcpServer:
    return TcpServer("127.0.0.1", 0, advertised_host=None, engine_id="e1", clock=time.monotonic, timeout_s=30.0)


def leases() -> LeaseTable:
    return LeaseTable(lease_s=30.0, peer_timeout_s=3.0, clock=time.monotonic, notify=lambda: None)


def serving_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("outrider-tcp")]


def test_it_ends_at_whatever_point_its_thread_is() -> None:
    for _ in range(100):
        started = server()
        started.start(BLOCKS, leases())
        started.close(0.0)
        assert serving_threads() == []


def test_connections_that_say_nothing_end_with_it() -> None:
    started = server()
    started.start(BLOCKS, leases())
    host, _, port = started.address.rpartition(":")
    clients = [socket.create_connection((host, int(port))) for _ in range(8)]
    started.close(0.0)
    assert serving_threads() == []
    for client in clients:
        with client, suppress(ConnectionResetError):  # one that was not accepted yet
            client.settimeout(10.0)
            assert client.recv(1) == b""


def test_one_that_never_started_ends_too() -> None:
    unstarted = server()
    unstarted.close(0.0)
    unstarted.close(0.0)
