"""The scheduler's view of a connector: KV that comes from elsewhere and goes there."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import count

from connectors.base import ConnectorScheduler, Finished, TransferPlan
from server.kv.block_pool import BlockPool
from server.scheduler.held_blocks import HeldBlocks
from server.scheduler.kv_loads import KVLoads
from server.scheduler.kv_saves import KVSaves
from server.scheduler.outputs import SequenceOutput
from server.scheduler.sequence import Sequence
from server.scheduler.statistics import Counters


class ExternalKV:
    """Loads and saves of one connector; owned by the scheduler."""

    def __init__(
        self,
        connector: ConnectorScheduler[object],
        pool: BlockPool,
        block_size: int,
        clock: Callable[[], float],
        counters: Counters,
    ) -> None:
        self._connector = connector
        self._counters = counters
        next_id = count().__next__
        self.held = HeldBlocks(pool)
        self.loads = KVLoads(connector, pool, self.held, block_size, clock, next_id, counters)
        self.saves = KVSaves(connector, pool, self.held, block_size, clock, next_id, counters)

    def plan(self) -> TransferPlan | None:
        """What the worker half is to do next; None for nothing."""
        self.saves.tell()
        filled = self.loads.take_filled()
        metadata = self._connector.build_connector_meta()
        return None if metadata is None else TransferPlan(metadata, filled)

    def settle(
        self, finished: Finished, bad_blocks: frozenset[int]
    ) -> tuple[SequenceOf[SequenceOutput], SequenceOf[Sequence]]:
        """Take in what the worker half has ended.

        Returns: outputs that waited for their blocks to be saved, and waiting sequences whose load has failed.
        """
        settled = [self.loads.settle(seq_id, bad_blocks) for seq_id in finished.loaded]
        self.saves.released(finished.released)
        self._counters.save_failures.update(finished.save_failures)
        return self.saves.saved(finished.saved), [sequence for sequence in settled if sequence is not None]

    def end(self, finished: Finished) -> None:
        """The engine has stopped. Args: finished: what the worker half has ended to the last."""
        self._counters.save_failures.update(finished.save_failures)
        self.saves.end(finished.saved)

    def end_overdue(self, now: float) -> tuple[SequenceOf[SequenceOutput], SequenceOf[Sequence]]:
        """As `settle`, of what should have ended by now."""
        return self.saves.end_overdue(now), self.loads.end_overdue(now)
