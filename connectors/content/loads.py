"""Loads from a store, on threads that wait for it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from connectors.base import BlockLoad, Finished
from connectors.content.groups import StoredGroup
from connectors.content.patience import Patience
from connectors.store import BlockStore
from connectors.threads import Threads

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Loading:
    """A load that waits for a thread, or has one. Attributes: since_s: when its current block was begun."""

    order: BlockLoad
    since_s: float
    is_wanted: bool = True


class Loads:
    """Straight to the blocks where these are in host memory; all methods are the step thread's.

    The blocks of a load that has a thread belong to that until the store has answered for the block at hand, however
    long that takes: it may write to them.
    """

    def __init__(
        self,
        store: BlockStore,
        groups: Sequence[StoredGroup],
        threads: Threads,
        clock: Callable[[], float],
        end: Callable[[Finished, frozenset[int]], None],
    ) -> None:
        """Args: end: told of each load, and which of its blocks are bad, from any thread."""
        self._store = store
        self._groups = groups
        self._threads = threads
        self._clock = clock
        self._end = end
        self._queued: dict[int, _Loading] = {}
        self._moving: dict[int, _Loading] = {}

    def begin(self, load: BlockLoad) -> None:
        """Have it done by the next thread that is free."""
        self._queued[load.seq_id] = _Loading(load, self._clock())
        self._threads.submit(partial(self._load, load.seq_id))

    def cancel(self, seq_id: int) -> None:
        """End a load: now, if it still waits for a thread, else behind the block that is being loaded."""
        loading = self._queued.pop(seq_id, None)
        if loading is not None:
            self._end(Finished(loaded=(seq_id,)), frozenset(loading.order.block_ids))
        elif (loading := self._moving.get(seq_id)) is not None:
            loading.is_wanted = False

    def cancel_all(self) -> None:
        """End all of them in this way."""
        for seq_id in [*self._queued, *self._moving]:
            self.cancel(seq_id)

    def check(self, patience: Patience) -> None:
        """If the store hangs, leave it alone from now on, and end the loads that wait for a thread."""
        if any(patience.is_spent(loading.since_s) for loading in list(self._moving.values())):
            patience.lose()
            for seq_id in list(self._queued):
                self.cancel(seq_id)

    def _load(self, seq_id: int) -> None:
        loading = self._queued.pop(seq_id, None)  # by one thread only, the step thread's `cancel` included
        if loading is None:
            return
        loading.since_s = self._clock()
        self._moving[seq_id] = loading
        load = loading.order
        num_good, complete = 0, []
        try:
            for block_id, block_hash in zip(load.block_ids, load.hashes, strict=True):
                if not loading.is_wanted:
                    break
                loading.since_s = self._clock()
                filled = [self._fill(group, block_id, block_hash) for group in self._groups]
                if not filled[0]:
                    break
                num_good += 1
                if all(filled):
                    complete.append(block_id)
        except Exception:
            logger.exception("loading blocks failed")
        del self._moving[seq_id]
        self._end(Finished(loaded=(load.seq_id,), complete=tuple(complete)), frozenset(load.block_ids[num_good:]))

    def _fill(self, group: StoredGroup, block_id: int, block_hash: bytes) -> bool:
        with group.blocks.writing(block_id) as buffer:
            return self._store.load(group.namespace, block_hash, buffer)
