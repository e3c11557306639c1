"""A socket that never waits longer than it is told, and that any thread can stop."""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence

from connectors.peer.address import PeerAddress
from connectors.tcp.messages import ALIGNMENT, HEADER, Message, pack, padded, unpack, unpack_header

TICK_S = 0.1
_TICK = struct.pack("@ll", 0, int(TICK_S * 1e6))  # a timeval
WAKE_NBYTES = 1 << 20
"""Of what is longer, a reader wakes for no less than this at a time, but for its last part."""


class ConnectionLost(ConnectionError):
    """The other side is gone, or the connection was stopped."""


class Connection:
    """One end of a connection; used by one thread, but for `stop`.

    Whatever waits has a time, on the engine's clock, after which it raises TimeoutError, at most TICK_S late. After any
    error nothing is known of what is on its way, so the connection is to be closed.

    The system waits for whole buffers, which takes less calls than waiting for each part of them to arrive; it looks
    up every now and then, so that time can be kept.
    """

    def __init__(self, sock: socket.socket, clock: Callable[[], float]) -> None:
        self._socket = sock
        self._clock = clock
        self._closing = threading.Lock()  # so that `stop` never meets another file behind the same number
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, _TICK)

    @classmethod
    def open(cls, address: PeerAddress, clock: Callable[[], float], timeout_s: float) -> "Connection":
        """Connect. Raises: OSError."""
        return cls(socket.create_connection((address.host, address.port), timeout_s), clock)

    def _check_time(self, until_s: float) -> float:
        left_s = until_s - self._clock()
        if left_s <= 0:
            raise TimeoutError("its time is up")
        return left_s

    def send(self, *messages: Message, until_s: float) -> None:
        """Send messages. Raises: OSError."""
        self.send_buffers([b"".join(map(pack, messages))], until_s=until_s)

    def send_buffers(self, buffers: Sequence[bytes | memoryview], *, until_s: float) -> None:
        """Send bytes from where they lie. Raises: OSError."""
        left = [memoryview(buffer) for buffer in buffers]
        while left:
            self._check_time(until_s)
            with contextlib.suppress(BlockingIOError):
                _take(left, self._socket.sendmsg(left))

    def receive_into(self, buffers: Sequence[memoryview | bytearray], *, until_s: float) -> None:
        """Fill buffers. Raises: OSError.

        Without being told, the system wakes who waits for every packet, and it is the sender's core that does so.
        """
        last = [memoryview(buffer) for buffer in buffers]
        first = _take(last, sum(buffer.nbytes for buffer in last) - WAKE_NBYTES)
        if first:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, WAKE_NBYTES)
            self._fill(first, until_s)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)  # or what is less would not wake it
        self._fill(last, until_s)

    def _fill(self, left: list[memoryview], until_s: float) -> None:
        while left:
            self._check_time(until_s)
            with contextlib.suppress(BlockingIOError):
                count = self._socket.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
                if not count:
                    raise ConnectionLost("the other side has closed the connection")
                _take(left, count)

    def receive(self, *, until_s: float) -> Message:
        """The next message, which is on its way. Raises: OSError, ProtocolError."""
        message = bytearray(ALIGNMENT)
        self.receive_into([message], until_s=until_s)
        kind, nbytes = unpack_header(message)
        rest = bytearray(padded(nbytes) - ALIGNMENT)
        if rest:
            self.receive_into([rest], until_s=until_s)
            message += rest
        return unpack(kind, bytes(message[HEADER.size : HEADER.size + nbytes]))

    def receive_next(self, *, idle_s: float, timeout_s: float) -> Message:
        """The next message, which may never come.

        Args: idle_s: until it begins. timeout_s: from then until its end.
        Raises: OSError, ProtocolError.
        """
        self._wait_for_byte(self._clock() + idle_s)
        return self.receive(until_s=self._clock() + timeout_s)

    def _wait_for_byte(self, until_s: float) -> None:
        """Wait without looking up, as most connections are idle."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not poll.poll(1000 * self._check_time(until_s)):
            pass

    def stop(self) -> None:
        """Have whoever waits for this connection raise an error soon; from any thread, never waits."""
        with self._closing, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nothing is sent or received any more."""
        self.stop()
        with self._closing:
            self._socket.close()


def _take(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Take so many bytes from the front; none if that is negative."""
    taken = []
    for buffer in buffers:
        if count < buffer.nbytes:
            break
        count -= buffer.nbytes
        taken.append(buffer)
    del buffers[: len(taken)]
    if count > 0:
        taken.append(buffers[0][:count])
        buffers[0] = buffers[0][count:]
    return taken
