"""Questions to a store: how many blocks it has of what a sequence lacks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from connectors.store import BlockStore
from connectors.threads import Threads


@dataclass(slots=True)
class Lookup:
    """A question.

    Attributes:
        first_block: the first of the sequence's blocks that was asked for.
        since_s: when it was asked, on the engine's clock.
        num_found: how many blocks the store has from there on; None until it has answered.
    """

    first_block: int
    since_s: float
    num_found: int | None = None
    is_wanted: bool = True


class Lookups:
    """The questions of all sequences, one at most of each; all methods are the step thread's."""

    def __init__(
        self,
        store: BlockStore,
        namespace: str,
        threads: Threads,
        clock: Callable[[], float],
        notify: Callable[[], None],
    ) -> None:
        """Args: threads: that wait for the answers. notify: called by them behind each."""
        self._store = store
        self._namespace = namespace
        self._threads = threads
        self._clock = clock
        self._notify = notify
        self._lookups: dict[int, Lookup] = {}

    def get(self, seq_id: int) -> Lookup | None:
        """What was asked for a sequence and is not forgotten."""
        return self._lookups.get(seq_id)

    def ask(self, seq_id: int, first_block: int, hashes: Sequence[bytes]) -> None:
        """Have the store asked for these blocks."""
        lookup = self._lookups[seq_id] = Lookup(first_block, self._clock())
        self._threads.submit(partial(self._ask, lookup, hashes))

    def forget(self, seq_id: int) -> bool:
        """Nobody wants to know any more. Returns: whether something was asked for the sequence."""
        lookup = self._lookups.pop(seq_id, None)
        if lookup is not None:
            lookup.is_wanted = False
        return lookup is not None

    def _ask(self, lookup: Lookup, hashes: Sequence[bytes]) -> None:
        if not lookup.is_wanted:
            return  # the store had others to answer for too long
        num_found = 0
        try:
            num_found = self._store.find(self._namespace, hashes)
        finally:
            lookup.num_found = num_found
            self._notify()
