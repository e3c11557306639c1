"""The running sequences, their seats and their blocks."""

from bisect import insort
from collections import deque

from server.kv.block_pool import BlockPool
from server.scheduler.sequence import Sequence


class RunningBatch:
    """Sequences that hold a slot and KV blocks, in order; owned by the scheduler.

    A sequence that ends while a launched step still touches it is `draining`: it keeps slot and
    blocks until that step has settled.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int) -> None:
        self._pool = pool
        self._slots = deque(range(max_num_seqs))
        self.sequences: list[Sequence] = []
        self.draining: list[Sequence] = []

    @property
    def has_free_slot(self) -> bool:
        """Whether one more sequence has a seat."""
        return bool(self._slots)

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence, cached_blocks: list[int], new_blocks: list[int]) -> None:
        """Seat a sequence on blocks the caller acquired and allocated for it."""
        sequence.slot = self._slots.popleft()
        sequence.block_ids = cached_blocks + new_blocks
        sequence.num_published = len(cached_blocks)
        insort(self.sequences, sequence, key=lambda s: s.order)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; what a launched step may still touch is given back when that settles."""
        self.sequences.remove(sequence)
        if sequence.in_flight:
            self.draining.append(sequence)
        else:
            self._give_back(sequence)

    def settle_draining(self, sequence: Sequence) -> None:
        """Note that a step of a draining sequence has settled."""
        sequence.in_flight.popleft()
        if not sequence.in_flight:
            self.draining.remove(sequence)
            self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._pool.release(sequence.block_ids)
        self._slots.append(sequence.slot)
        sequence.slot = None
        sequence.block_ids = []
        sequence.num_published = 0
