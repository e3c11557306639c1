"""The port that blocks are served at, and the end of its threads."""

import socket
import time
from contextlib import suppress
from typing import Any, cast

from connectors.peer.leases import LeaseTable
from connectors.tcp.server import TcpServer
from tests.fakes.thread_watch import no_thread_is_left

BLOCKS = cast("Any", None)
"""Nobody gets as far as asking for any."""


def server() -> TcpServer:
    return TcpServer("127.0.0.1", 0, advertised_host=None, engine_id="e1", clock=time.monotonic, timeout_s=30.0)


def leases() -> LeaseTable:
    return LeaseTable(lease_s=30.0, peer_timeout_s=3.0, clock=time.monotonic, notify=lambda: None)


def test_it_ends_at_whatever_point_its_thread_is() -> None:
    with no_thread_is_left():
        for _ in range(100):
            started = server()
            started.start(BLOCKS, leases())
            started.close(0.0)


def test_connections_that_say_nothing_end_with_it() -> None:
    with no_thread_is_left():
        started = server()
        started.start(BLOCKS, leases())
        host, _, port = started.address.rpartition(":")
        clients = [socket.create_connection((host, int(port))) for _ in range(8)]
        started.close(0.0)
    for client in clients:
        with client, suppress(ConnectionResetError):  # one that was not accepted yet
            client.settimeout(30.0)
            assert client.recv(1) == b""


def test_one_that_never_started_ends_too() -> None:
    unstarted = server()
    unstarted.close(0.0)
    unstarted.close(0.0)
