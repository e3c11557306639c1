"""Saves to a store, on threads that wait for it."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

from connectors.base import BlockSave, Finished
from connectors.content.groups import StoredGroup
from connectors.layer_stages import StagedBlock
from connectors.save_failure import SaveFailure
from connectors.store import BlockStore
from connectors.threads import Threads

logger = logging.getLogger(__name__)


class Saves:
    """Straight from the blocks where these are in host memory."""

    def __init__(
        self,
        store: BlockStore,
        groups: Sequence[StoredGroup],
        threads: Threads,
        end: Callable[[Finished, frozenset[int]], None],
    ) -> None:
        """Args: end: told of each save, from any thread."""
        self._store = store
        self._groups = groups
        self._threads = threads
        self._end = end

    def begin(self, save: BlockSave, staged: StagedBlock | None) -> None:
        """Have it done by the next thread that is free. Args: staged: a copy of the target's bytes, if there is one."""
        self._threads.submit(partial(self._save, save, staged))

    def _save(self, save: BlockSave, staged: StagedBlock | None) -> None:
        try:
            failure = self._keep(save, None if staged is None else staged.data)
        except Exception:
            logger.exception("saving a block failed")
            failure = SaveFailure.BROKEN
        failures = () if failure is None else (failure,)
        self._end(Finished(saved=(save.block_id,), save_failures=failures), frozenset())

    def _keep(self, save: BlockSave, target: memoryview | None) -> SaveFailure | None:
        """Save all groups of a block, up to the first that the store does not keep.

        Args: target: the target's bytes, if there is a copy of them.
        """
        copies = [target, *(None for _ in self._groups[1:])]
        for stored, copy in zip(self._groups, copies, strict=True):
            if stored.group.is_whole(save.block_id):
                with stored.blocks.reading(save.block_id) if copy is None else nullcontext(copy) as data:
                    failure = self._store.save(stored.namespace, save.block_hash, data)
                if failure is not None:
                    return failure
        return None
