"""Nodes that die, hang or say what they must not while others load from them."""

import contextlib
import random
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from connectors.tcp.messages import (
    HEADER,
    MAX_KEPT,
    MAX_MESSAGE_NBYTES,
    PROTOCOL_VERSION,
    Hello,
    Keep,
    Kind,
    Pull,
    Release,
    pack,
)
from server.kv_handle import KVHandle
from tests.fakes.kv_node import KVNode
from tests.fakes.kv_process import KVProcess
from tests.fakes.relay import Relay
from tests.fakes.thread_watch import no_thread_is_left

WIDTH = 1 << 14  # of blocks of 1.5 MiB
NUM_BLOCKS = 24


@pytest.fixture
def producer() -> Iterator[KVProcess]:
    process = KVProcess(engine_id="producer", num_blocks=NUM_BLOCKS, width=WIDTH)
    yield process
    process.close()


@pytest.fixture
def consumer() -> Iterator[KVNode]:
    with no_thread_is_left():
        node = KVNode(engine_id="consumer", num_blocks=NUM_BLOCKS, width=WIDTH, transfer_timeout_seconds=4.0)
        yield node
        node.close()


@pytest.fixture
def local() -> Iterator[KVNode]:
    """A node in this process that waits for nobody."""
    with no_thread_is_left():
        node = KVNode(engine_id="local", transfer_timeout_seconds=1.0)
        yield node
        node.close()


class Gate:
    """Lets some bytes through, then waits to be opened."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, data: bytes, num_before: int) -> bytes:
        if num_before >= self._num_bytes:
            self.reached.set()
            self.opened.wait(60.0)
        return data


def test_between_two_processes(producer: KVProcess, consumer: KVNode) -> None:
    handle = producer.hand_on(*range(NUM_BLOCKS))
    assert consumer.wait_for_load(consumer.begin(handle, *range(NUM_BLOCKS))) == frozenset()
    expected = KVNode(num_blocks=NUM_BLOCKS, width=WIDTH)
    assert torch.equal(consumer.blocks, expected.fill())
    expected.close()
    producer.wait_for_release(handle)


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
@pytest.mark.parametrize(
    "num_bytes",
    [
        pytest.param(0, marks=pytest.mark.full, id="before it answers"),
        pytest.param(64, id="after it greeted"),
        pytest.param(1 << 20, marks=pytest.mark.full, id="within a block"),
        pytest.param(20 << 20, id="after some blocks"),
    ],
)
def test_a_node_that_dies_or_hangs_during_a_load(
    producer: KVProcess, consumer: KVNode, fate: signal.Signals, num_bytes: int
) -> None:
    handle = producer.hand_on(*range(NUM_BLOCKS))
    gate = Gate(num_bytes)
    relay = Relay(handle.address, gate)
    seq_id = consumer.begin(relay.through(handle), *range(NUM_BLOCKS))
    assert gate.reached.wait(30.0)
    producer.signal(fate)
    gate.opened.set()
    bad = consumer.wait_for_load(seq_id)
    assert bad == set(range(NUM_BLOCKS - len(bad), NUM_BLOCKS))
    assert bad
    relay.close()


def test_a_node_that_hangs_keeps_nobody_else_waiting(producer: KVProcess, consumer: KVNode) -> None:
    stopped = producer.hand_on(0, 1)
    producer.signal(signal.SIGSTOP)
    waiting = consumer.begin(stopped, 0, 1)
    fitting = KVNode(engine_id="other", num_blocks=NUM_BLOCKS, width=WIDTH)
    content = fitting.fill(3)
    assert consumer.wait_for_load(consumer.begin(fitting.hand_on(2, 3), 2, 3)) == frozenset()
    assert torch.equal(consumer.blocks[2:4], content[2:4])
    assert waiting not in consumer.ended.bad
    assert consumer.wait_for_load(waiting) == {0, 1}
    fitting.close()


def test_a_reader_that_hangs_loses_its_lease() -> None:
    """Its socket takes no more bytes, and no sign of life comes."""
    with no_thread_is_left():
        node = KVNode(engine_id="n", num_blocks=NUM_BLOCKS, width=WIDTH, peer_timeout_seconds=0.4)
        node.fill()
        handle = node.hand_on(*range(NUM_BLOCKS))
        with connected(handle) as sock:
            sock.sendall(pack(Hello("n")) + pack(Pull(handle.lease_id, 0, NUM_BLOCKS, 1, b"")))
            sock.recv(1000)
            node.wait_for_release(handle)
        node.close()


def connected(handle: KVHandle) -> socket.socket:
    host, _, port = handle.address.rpartition(":")
    sock = socket.create_connection((host, int(port)), 30.0)
    sock.settimeout(30.0)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Read until the other side has closed the connection. Raises: TimeoutError if it does not."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


def still_serves(node: KVNode) -> None:
    reader = KVNode(engine_id="reader")
    content = node.fill()
    assert reader.wait_for_load(reader.begin(node.hand_on(0, 1), 0, 1)) == frozenset()
    assert torch.equal(reader.blocks[:2], content[:2])
    reader.close()


GREETING = pack(Hello("local"))


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(64), id="HTTP"),
        pytest.param(bytes(64), id="zeros"),
        pytest.param(HEADER.pack(Kind.HELLO, 0xFFFFFFFF) + bytes(56), id="4 GiB"),
        pytest.param(HEADER.pack(Kind.HELLO, MAX_MESSAGE_NBYTES + 1) + bytes(56), id="one byte too long"),
        pytest.param(pack(Pull("0" * 32, 0, 1, 1, b"")), id="no greeting"),
        pytest.param(pack(Hello("another")), id="another engine"),
        pytest.param(pack(Hello("local", version=PROTOCOL_VERSION - 1)), id="another version"),
        pytest.param(GREETING + GREETING, id="two greetings"),
        pytest.param(GREETING + HEADER.pack(Kind.DATA, 9) + bytes(56), id="data for the server"),
        pytest.param(GREETING + HEADER.pack(Kind.KEEP, 16 * MAX_KEPT + 16) + bytes(20_000), id="too many leases"),
        pytest.param(GREETING + HEADER.pack(Kind.PULL, 26) + bytes(56), id="a pull of nothing"),
        pytest.param(GREETING + HEADER.pack(99, 0) + bytes(56), id="unknown kind"),
    ],
)
def test_what_must_not_be_said_ends_the_connection(local: KVNode, said: bytes) -> None:
    with connected(local.hand_on(0)) as sock:
        sock.sendall(said)
        assert is_closed(sock)
    still_serves(local)


@pytest.mark.parametrize(
    "said",
    [b"", b"\x01", GREETING + b"\x04", GREETING + HEADER.pack(Kind.KEEP, 16_000)],
    ids=["nothing", "no greeting", "half a header", "half a message"],
)
def test_whoever_does_not_end_what_they_say_is_not_waited_for(local: KVNode, said: bytes) -> None:
    with connected(local.hand_on(0)) as sock:
        sock.sendall(said)
        assert is_closed(sock)


def test_whoever_says_it_byte_by_byte_is_not_waited_for(local: KVNode) -> None:
    pause = threading.Event()
    num_said = 0
    with connected(local.hand_on(0)) as sock, contextlib.suppress(ConnectionError):
        for byte in GREETING:
            sock.sendall(bytes([byte]))
            num_said += 1
            pause.wait(0.05)
    assert 0 < num_said < len(GREETING)
    still_serves(local)


def test_random_bytes(local: KVNode) -> None:
    chance = random.Random(0)
    handle = local.hand_on(0, 1, 2)
    pull = pack(Pull(handle.lease_id, 0, 3, 1, b""))
    for _ in range(150):
        said = bytearray(GREETING + pull + pack(Keep(("1" * 32,))) + pack(Release(("2" * 32,))))
        for _ in range(chance.randrange(1, 5)):
            said[chance.randrange(len(said))] = chance.randrange(256)
        with connected(handle) as sock:
            sock.sendall(said[: chance.randrange(1, len(said))])
            with contextlib.suppress(OSError):  # closed by the other side already
                sock.shutdown(socket.SHUT_WR)
            assert is_closed(sock)
    still_serves(local)


@pytest.mark.parametrize(
    ("first", "count", "groups"), [(0, 4, 1), (3, 1, 1), (0, (1 << 31) - 1, 1), ((1 << 31) - 1, 1, 1), (0, 1, 2)]
)
def test_more_than_a_lease_has_is_not_given(local: KVNode, first: int, count: int, groups: int) -> None:
    handle = local.hand_on(0, 1, 2)
    with connected(handle) as sock:
        sock.sendall(GREETING + pack(Pull(handle.lease_id, first, count, groups, b"")))
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while data := sock.recv(1 << 16):
            answer += data
    welcome_nbytes = 64 * (1 + (HEADER.unpack_from(answer)[1] + 7) // 64)
    kind, _ = HEADER.unpack_from(answer, welcome_nbytes)
    assert kind == Kind.FAILED
    assert len(answer) <= welcome_nbytes + 192


class HostileServer:
    """Says the same to everybody who connects."""

    def __init__(self, said: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._said = said
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                try:
                    sock.sendall(self._said)
                    sock.settimeout(0.5)
                    while sock.recv(1 << 16):
                        pass
                except OSError:
                    pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5.0)


def _welcome(local: KVNode) -> bytes:
    with connected(local.hand_on(0)) as sock:
        sock.sendall(GREETING)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while data := sock.recv(1 << 16):
            answer += data
    return answer


@pytest.fixture
def hostile() -> Iterator[Callable[[bytes], HostileServer]]:
    servers: list[HostileServer] = []

    def make(said: bytes) -> HostileServer:
        servers.append(HostileServer(said))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


DATA = struct.Struct("<?Q")


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64), id="HTTP"),
        pytest.param(HEADER.pack(Kind.WELCOME, 0xFFFFFFFF) + bytes(56), id="4 GiB"),
        pytest.param(HEADER.pack(Kind.WELCOME, 5) + bytes(56), id="no groups"),
        pytest.param(pack(Keep(())), id="another message"),
        pytest.param(b"W" + HEADER.pack(Kind.DATA, 27) + DATA.pack(True, 0) * 3 + bytes(29), id="more than was asked"),
        pytest.param(b"W" + HEADER.pack(Kind.DATA, 9) + DATA.pack(False, 0) + bytes(47), id="no target"),
        pytest.param(b"W" + HEADER.pack(Kind.DATA, 9) + DATA.pack(True, 1) + bytes(47) + bytes(768), id="wrong sum"),
        pytest.param(b"W" + HEADER.pack(Kind.DATA, 8) + bytes(56), id="half a checksum"),
        pytest.param(b"W" + HEADER.pack(Kind.KEEP, 0) + bytes(56), id="out of turn"),
    ],
)
def test_a_hostile_node_is_a_failed_load(local: KVNode, hostile: Callable[[bytes], HostileServer], said: bytes) -> None:
    handle = local.hand_on(0, 1)
    server = hostile(said if said[:1] != b"W" else _welcome(local) + said[1:])
    reader = KVNode(engine_id="reader", transfer_timeout_seconds=1.0)
    forged = KVHandle(**{**{name: getattr(handle, name) for name in handle.__slots__}, "address": server.address})
    assert reader.wait_for_load(reader.begin(forged, 4, 5)) == {4, 5}
    untouched = [i for i in range(16) if i not in (4, 5)]
    assert not reader.blocks[untouched].any()
    reader.close()
