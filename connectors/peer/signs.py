"""Signs of life to one node for the leases that are used here, and their end."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol


class SignSender(Protocol):
    """How signs reach the node; used by one thread."""

    def send(self, kept: Sequence[str], released: Sequence[str]) -> None:
        """Say that the first leases are wanted, and the second are not any more; never raises, waits little."""

    def close(self) -> None:
        """Nothing will be sent any more."""


class SignsOfLife:
    """Has a thread of its own, from the first lease on, so that no transfer delays a sign.

    What can not be sent is dropped: without signs the other node ends the leases by itself.
    """

    def __init__(
        self, sender: SignSender, clock: Callable[[], float], *, name: str, period_s: float, hold_s: float
    ) -> None:
        """Args: name: of the thread. period_s: between two signs. hold_s: how long a lease is held without a load."""
        self._sender = sender
        self._clock = clock
        self._name = name
        self._period_s = period_s
        self._hold_s = hold_s
        self._changed = threading.Condition()
        self._used: Counter[str] = Counter()
        self._held_until_s: dict[str, float] = {}
        self._released: list[str] = []
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
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
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
            if now < next_s or is_closed:
                kept = []
            else:
                next_s = now + self._period_s
            if kept or released:
                self._sender.send(kept, released)
            if is_closed:
                self._sender.close()
                return

    def close(self) -> threading.Thread | None:
        """Send what is to be sent, and end. Returns: the thread to wait for."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            return self._thread
