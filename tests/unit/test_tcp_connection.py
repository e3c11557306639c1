"""Bytes that come over a connection, in whatever parts."""

import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from connectors.tcp.connection import WAKE_NBYTES, Connection, ConnectionLost

TIMEOUT_S = 30.0


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Connection, socket.socket]]:
    """Who reads, and does not look up by itself in the time of a test; and a socket at the other end."""
    monkeypatch.setattr("connectors.tcp.connection._TICK", struct.pack("@ll", 2 * int(TIMEOUT_S), 0))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as far:
        near, _ = listener.accept()
        with closing(Connection(near, time.monotonic)) as connection:
            yield connection, far


def send_in_parts(sock: socket.socket, data: bytes, seed: int) -> threading.Thread:
    """From another thread, now a little and now a lot."""
    rng = random.Random(seed)

    def send() -> None:
        start = 0
        while start < len(data):
            end = start + rng.choice([1, 64, 1000, WAKE_NBYTES - 1, WAKE_NBYTES, 3 * WAKE_NBYTES])
            sock.sendall(data[start:end])
            start = end

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([64], id="short"),
        pytest.param([WAKE_NBYTES], id="as long as a reader sleeps"),
        pytest.param([WAKE_NBYTES + 1], id="a byte longer"),
        pytest.param([5 * WAKE_NBYTES + 7], id="long"),
        pytest.param([WAKE_NBYTES // 4] * 11, id="parts that divide it"),
        pytest.param([WAKE_NBYTES // 3] * 8 + [1], id="parts that do not"),
        pytest.param([10] * 900, id="many short ones"),
        pytest.param([2 * WAKE_NBYTES, 3], id="a short one behind a long one"),
    ],
)
def test_buffers_are_filled_as_soon_as_all_is_there(
    ends: tuple[Connection, socket.socket], sizes: list[int], seed: int
) -> None:
    """Those of the next read too: nobody sleeps until more is there than will ever come."""
    connection, far = ends
    data = random.Random(seed).randbytes(2 * sum(sizes))
    thread, until_s = send_in_parts(far, data, seed), time.monotonic() + TIMEOUT_S
    came = b""
    for _ in range(2):
        buffers = [bytearray(size) for size in sizes]
        connection.receive_into(buffers, until_s=until_s)
        came += b"".join(buffers)
    assert time.monotonic() < until_s
    thread.join(TIMEOUT_S)
    assert came == data


@pytest.mark.parametrize("nbytes", [0, 100, WAKE_NBYTES + 100])
@pytest.mark.parametrize("is_stopped_here", [False, True])
def test_who_waits_for_much_hears_at_once_that_nothing_comes(
    ends: tuple[Connection, socket.socket], nbytes: int, is_stopped_here: bool
) -> None:
    connection, far = ends
    far.sendall(bytes(nbytes))
    timer = threading.Timer(0.05, connection.stop if is_stopped_here else far.close)
    timer.start()
    until_s = time.monotonic() + TIMEOUT_S
    with pytest.raises(ConnectionLost):
        connection.receive_into([bytearray(4 * WAKE_NBYTES)], until_s=until_s)
    assert time.monotonic() < until_s
    timer.join()
