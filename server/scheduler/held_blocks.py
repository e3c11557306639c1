"""KV blocks that others than sequences have a reference to."""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from collections.abc import Set as AbstractSet

from server.kv.block_pool import BlockPool


class HeldBlocks:
    """What loads, saves and leases hold of a pool; owned by the scheduler."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._references: Counter[int] = Counter()

    def __len__(self) -> int:
        """Blocks, some of which sequences may have as well."""
        return len(self._references)

    @property
    def block_ids(self) -> AbstractSet[int]:
        """Which they are."""
        return self._references.keys()

    def acquire(self, block_ids: SequenceOf[int]) -> None:
        """Add one reference to each."""
        self._pool.acquire(block_ids)
        self._references.update(block_ids)

    def allocate(self, count: int) -> list[int]:
        """Take free blocks, of which there must be enough."""
        block_ids = self._pool.allocate(count)
        assert block_ids is not None
        self._references.update(block_ids)
        return block_ids

    def release(self, block_ids: SequenceOf[int]) -> None:
        """Drop one reference from each, given in the order of the sequence that they are of."""
        for block_id in block_ids:
            self._references[block_id] -= 1
            if not self._references[block_id]:
                del self._references[block_id]
        self._pool.release(block_ids)
