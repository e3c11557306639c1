"""Signs of life to one node for the leases that are used here, and their end."""

import logging
import threading
from collections import Counter
from collections.abc import Callable

from connectors.peer_address import PeerAddress
from connectors.tcp_connection import Connection
from connectors.tcp_messages import Hello, Keep, ProtocolError, Release, Welcome, leases_in_messages

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 1.0


class SignsOfLife:
    """Has a thread and a connection of its own, from the first lease on, so that no transfer delays a sign.

    What can not be sent is dropped: without signs the other node ends the leases by itself.
    """

    def __init__(
        self, address: PeerAddress, engine_id: str, clock: Callable[[], float], *, period_s: float, hold_s: float
    ) -> None:
        """Args: period_s: between two signs. hold_s: how long a lease is held that no load uses yet."""
        self._address = address
        self._engine_id = engine_id
        self._clock = clock
        self._period_s = period_s
        self._hold_s = hold_s
        self._changed = threading.Condition()
        self._used: Counter[str] = Counter()
        self._held_until_s: dict[str, float] = {}
        self._released: list[str] = []
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to say."""
        with self._changed:
            return not (self._used or self._held_until_s or self._released)

    def hold(self, lease_id: str) -> None:
        """A load is to come."""
        with self._changed:
            self._held_until_s[lease_id] = self._clock() + self._hold_s
            self._wake()

    def use(self, lease_id: str) -> None:
        """A load uses it."""
        with self._changed:
            self._used[lease_id] += 1
            self._held_until_s.pop(lease_id, None)
            self._wake()

    def leave(self, lease_id: str) -> None:
        """A load has ended; with the last of them the lease does."""
        with self._changed:
            self._used[lease_id] -= 1
            if self._used[lease_id] > 0:
                return
            del self._used[lease_id]
            self._released.append(lease_id)
            self._wake()

    def release(self, lease_id: str) -> None:
        """No load will come."""
        with self._changed:
            self._held_until_s.pop(lease_id, None)
            if lease_id not in self._used:
                self._released.append(lease_id)
                self._wake()

    def _wake(self) -> None:
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="outrider-tcp-signs", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        next_s = self._clock()
        while True:
            with self._changed:
                while not self._released and not self._is_closed:
                    is_needed = bool(self._used or self._held_until_s)
                    if is_needed and self._clock() >= next_s:
                        break
                    self._changed.wait(max(0.001, next_s - self._clock()) if is_needed else None)
                released, self._released = self._released, []
                now = self._clock()
                self._held_until_s = {lease: until for lease, until in self._held_until_s.items() if until > now}
                kept = [*self._used, *self._held_until_s]
                is_closed = self._is_closed
            messages = leases_in_messages(released, Release)
            if now >= next_s and not is_closed:
                messages += leases_in_messages(kept, Keep)
                next_s = now + self._period_s
            self._send(messages)
            if is_closed:
                break
        if self._connection is not None:
            self._connection.close()

    def _send(self, messages: bytes) -> None:
        """Once more on a new connection if the old one turns out to be lost."""
        for _ in range(2 if messages else 0):
            was_open = self._connection is not None
            try:
                if self._connection is None:
                    self._connect()
                assert self._connection is not None
                self._connection.send_buffers([messages], until_s=self._clock() + SEND_TIMEOUT_S)
                return
            except (OSError, ProtocolError) as error:
                logger.debug("no sign of life to %s: %s", self._address, error)
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                if not was_open:
                    return

    def _connect(self) -> None:
        """Raises: OSError, ProtocolError."""
        until_s = self._clock() + SEND_TIMEOUT_S
        self._connection = Connection.open(self._address, self._clock, SEND_TIMEOUT_S)
        self._connection.send(Hello(self._engine_id), until_s=until_s)
        answer = self._connection.receive(until_s=until_s)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the answer to a greeting is {answer}")

    def close(self) -> threading.Thread | None:
        """Send what is to be sent, and end. Returns: the thread to wait for."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            return self._thread
