"""The KV blocks of one device: who holds which, which are free, which hold a known prefix."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0
"""Block 0 is never allocated: padding tokens write there and nothing reads it."""


class BlockPool:
    """Reference-counted blocks with an LRU of free ones; free blocks keep their content until reused.

    Owned by the scheduler and used from the step thread only. A block is written by the one
    sequence that allocated it until it is published under a hash; from then on it is read-only
    and may be shared.
    """

    def __init__(self, num_blocks: int) -> None:
        """Args: num_blocks: all blocks of the tensor, the null block included; at least 2."""
        assert num_blocks >= 2
        self.num_usable = num_blocks - 1
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks no sequence references, cached ones included."""
        return len(self._free)

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds this prefix, free or in use."""
        return self._block_of.get(block_hash)

    def is_free(self, block_id: int) -> bool:
        """Whether no sequence references the block."""
        return self._references[block_id] == 0

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block, taking it off the free list where it is there."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                del self._free[block_id]
            self._references[block_id] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Take the `count` least recently used free blocks, forgetting what they cached; None if too few."""
        if count > len(self._free):
            return None
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self._forget(block_id)
            self._references[block_id] = 1
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference from each block of a sequence, given in sequence order.

        The last blocks become the first to be reused: a prefix is useful without its end, not
        the other way round.
        """
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            assert self._references[block_id] >= 0, f"block {block_id} released twice"
            if self._references[block_id] == 0:
                self._free[block_id] = None
                if self._hash_of[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Share a full block under its hash; a block that already serves the hash stays the one."""
        if block_hash not in self._block_of and self._hash_of[block_id] is None:
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block_id] = None

    def check_integrity(self) -> None:
        """Assert the pool's invariants; callable in production when idle."""
        used = sum(1 for count in self._references if count > 0)
        assert used + len(self._free) == self.num_usable, f"{used} used + {len(self._free)} free != {self.num_usable}"
        assert self._references[NULL_BLOCK] == 0
        assert all(self._references[block_id] == 0 for block_id in self._free)
        assert all(self._hash_of[block_id] == block_hash for block_hash, block_id in self._block_of.items())
