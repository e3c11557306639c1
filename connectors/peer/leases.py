"""Blocks that are held for another node until it has read them, has given up, is gone, or time is up."""

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

LEASE_NBYTES = 16
"""A lease's name is the right to read its blocks, so it can not be guessed."""


class LeaseLost(Exception):
    """There is no such lease, or no longer."""


@dataclass(frozen=True, slots=True)
class LeasedBlocks:
    """What a lease holds.

    Attributes:
        block_ids: of the leading blocks of a prompt. hashes: of the same.
    """

    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]


@dataclass(slots=True)
class _Lease:
    """State of a lease.

    Attributes:
        ends_s: when it ends unless it is renewed. seen_s: of the last sign of life of a reader; None before the first.
        readers: stop each one that reads. is_over: nobody may begin to read; released once nobody reads.
    """

    seq_id: int
    blocks: LeasedBlocks
    ends_s: float
    seen_s: float | None = None
    readers: list[Callable[[], None]] = field(default_factory=list)
    is_over: bool = False


class LeaseTable:
    """All leases of an engine; used from any thread. Its lock is never held while anybody waits."""

    def __init__(
        self, *, lease_s: float, peer_timeout_s: float, clock: Callable[[], float], notify: Callable[[], None]
    ) -> None:
        """Args:
        lease_s: how long a lease lasts from the last sign of life on.
        peer_timeout_s: how long a reader that has given one may be silent.
        notify: called when a lease is released, with no lock held.
        """
        self._lease_s = lease_s
        self._peer_timeout_s = peer_timeout_s
        self._clock = clock
        self._notify = notify
        self._changed = threading.Condition()
        self._leases: dict[str, _Lease] = {}
        self._released: list[str] = []
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, seq_id: int, block_ids: Sequence[int], hashes: Sequence[bytes]) -> str:
        """Hold blocks for whoever is told the name that this returns."""
        assert len(block_ids) == len(hashes)
        lease_id = secrets.token_hex(LEASE_NBYTES)
        blocks = LeasedBlocks(tuple(block_ids), tuple(hashes))
        with self._changed:
            self._leases[lease_id] = _Lease(seq_id, blocks, self._clock() + self._lease_s)
            self._changed.notify_all()
        return lease_id

    def renew(self, lease_id: str) -> bool:
        """A sign of life of a lease's reader. Returns: whether the lease still held."""
        with self._changed:
            lease = self._leases.get(lease_id)
            return lease is not None and self._renew(lease)

    def _renew(self, lease: _Lease) -> bool:
        now = self._clock()
        if lease.is_over or self._is_late(lease, now):
            return False
        lease.seen_s, lease.ends_s = now, now + self._lease_s
        return True

    def _is_late(self, lease: _Lease, now: float) -> bool:
        is_silent = lease.seen_s is not None and now - lease.seen_s >= self._peer_timeout_s
        return is_silent or now >= lease.ends_s

    def end(self, lease_id: str) -> None:
        """Its reader has what it wants, or wants it no longer. No effect on a lease that is unknown.

        Who still reads is not stopped: it is done by now, or about to find its reader gone. If not, `sweep` is next.
        """
        self._end([lease_id], stops_readers=False)

    def cancel(self, seq_id: int) -> None:
        """Nobody is to get the KV of this sequence any more."""
        with self._changed:
            lease_ids = [lease_id for lease_id, lease in self._leases.items() if lease.seq_id == seq_id]
        self._end(lease_ids, stops_readers=True)

    def sweep(self) -> None:
        """End all leases whose time is up or whose reader is gone."""
        with self._changed:
            now = self._clock()
            late = [lease_id for lease_id, lease in self._leases.items() if self._is_late(lease, now)]
        self._end(late, stops_readers=True)

    def _end(self, lease_ids: Sequence[str], *, stops_readers: bool) -> None:
        """No new reader; the last one to go releases the lease."""
        stops: list[Callable[[], None]] = []
        num_released = 0
        with self._changed:
            for lease_id in lease_ids:
                lease = self._leases.get(lease_id)
                if lease is not None:
                    lease.is_over = True
                    stops += lease.readers if stops_readers else ()
                    num_released += self._release_if_unread(lease_id, lease)
        for stop in stops:
            stop()
        if num_released:
            self._notify()

    def _release_if_unread(self, lease_id: str, lease: _Lease) -> bool:
        if lease.readers or not lease.is_over:
            return False
        del self._leases[lease_id]
        self._released.append(lease_id)
        self._changed.notify_all()
        return True

    @contextmanager
    def reading(self, lease_id: str, stop: Callable[[], None]) -> Iterator[LeasedBlocks]:
        """The blocks of a lease, which stay as they are within the context.

        Args: stop: makes the reader leave soon; called from any thread, perhaps more than once. Never waits.
        Raises: LeaseLost.
        """
        with self._changed:
            lease = self._leases.get(lease_id)
            if lease is None or not self._renew(lease):
                raise LeaseLost(f"no lease {lease_id[:8]}… here: it has ended, or was never given")
            lease.readers.append(stop)
        try:
            yield lease.blocks
        finally:
            with self._changed:
                lease.readers.remove(stop)
                is_released = self._release_if_unread(lease_id, lease)
            if is_released:
                self._notify()

    def take_released(self) -> tuple[str, ...]:
        """Leases that were released since the last call."""
        with self._changed:
            released, self._released = self._released, []
        return tuple(released)

    def wait_for_any(self) -> bool:
        """Wait until there is a lease. Returns: False once the table is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._leases or self._is_closed)
            return not self._is_closed

    def wait_until_closed(self, timeout_s: float) -> None:
        """Return when the table is closed, or after so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, timeout_s)

    def close(self) -> None:
        """End all leases."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            lease_ids = list(self._leases)
        self._end(lease_ids, stops_readers=True)
