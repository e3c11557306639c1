"""A load on its way: what has come of it, and how to stop it."""

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from connectors.peer.transport import LoadOutcome, PeerLoad


class Stoppable(Protocol):
    """What a load waits for."""

    def stop(self) -> None:
        """Have it wait no longer; from any thread, never waits."""


class Cancelled(Exception):
    """Nobody waits for the load any more."""


class Loading:
    """State of one load. `begin` to `end` are its thread's, `cancel` is anybody's.

    Attributes:
        num_done: leading blocks that have come, well or not.
    """

    def __init__(self, load: PeerLoad, ended: Callable[[LoadOutcome], None]) -> None:
        self.load = load
        self.num_done = 0
        self._bad: set[int] = set()
        self._lacking: set[int] = set()
        self._ended = ended
        self._lock = threading.Lock()
        self._waits_for: Stoppable | None = None
        self._has_begun = False
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for it."""
        return self._is_cancelled

    def begin(self) -> bool:
        """Returns: False if it was cancelled while it waited for its turn; it is over then."""
        with self._lock:
            self._has_begun = True
            return not self._is_cancelled

    def cancel(self) -> bool:
        """Have it end soon. Returns: whether it had not begun: the caller is to end it."""
        with self._lock:
            is_first, self._is_cancelled = not self._is_cancelled, True
            if self._waits_for is not None:
                self._waits_for.stop()
            return is_first and not self._has_begun

    def use(self, waits_for: Stoppable | None) -> None:
        """What is to be stopped if it is cancelled. Raises: Cancelled."""
        with self._lock:
            self._waits_for = waits_for
            if waits_for is not None and self._is_cancelled:
                raise Cancelled

    def came(self, num_done: int, bad: Iterable[int], lacking: Iterable[int]) -> None:
        """So many leading blocks have come by now. Args: bad, lacking: places in the load, see `LoadOutcome`."""
        self.num_done = num_done
        self._bad |= set(bad)
        self._lacking |= set(lacking)

    def end(self) -> None:
        """Nothing is written to its blocks any more."""
        ids = self.load.block_ids
        bad = self._bad | set(range(self.num_done, len(ids)))
        complete = [block_id for place, block_id in enumerate(ids) if place not in bad and place not in self._lacking]
        self._ended(LoadOutcome(frozenset(ids[place] for place in bad), tuple(complete)))
