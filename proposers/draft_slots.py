"""What the host knows of a network's K and V: how far they lag behind the target's, and in which blocks they are whole.

Counts are upper bounds while steps are in flight; the device knows the true ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from server.plan import PlanRow


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A sequence enters the batch.

    Attributes:
        num_done: its positions below this need nothing more of the network.
        first: the network attends from this position on.
    """

    num_done: int
    first: int


@dataclass(slots=True)
class _Slot:
    """A sequence in the batch.

    Attributes:
        lag: most positions, of those the target has, that the network is still to do.
        first_whole: blocks from here on are whole once they are done, those in front were cached or left out.
        num_marked: blocks that were looked at already.
    """

    block_ids: list[int]
    lag: int
    first_whole: int
    num_marked: int


class DraftSlots:
    """The sequences in the batch and the blocks they share, for one network; owned by its proposer.

    A block is whole if the network did all its positions, and all that it attended to from there: everything in front,
    or for a network with features the whole blocks right in front at least. Blocks the target has cached need not be.
    """

    def __init__(self, num_blocks: int, block_size: int, *, is_fed: bool) -> None:
        """Args: is_fed: whether the network needs hidden states of the target, which are gone for old positions."""
        self._block_size = block_size
        self._is_fed = is_fed
        self._is_whole = bytearray(num_blocks)
        self._has_edge = bytearray(b"\1" * num_blocks)  # whether the target's hidden state at its end is known
        self._slots: dict[int, _Slot] = {}

    def start(self, slot: int, num_computed: int, block_ids: Sequence[int]) -> SlotStart:
        """A sequence takes a slot, with so many tokens in cached blocks."""
        num_cached = num_computed // self._block_size
        self._forget(block_ids[num_cached:])
        whole = [bool(self._is_whole[block_id]) for block_id in block_ids[:num_cached]]
        if self._is_fed:
            first_whole = num_cached
            while first_whole and whole[first_whole - 1]:
                first_whole -= 1
            start = SlotStart(max(1, num_computed), max(1, first_whole * self._block_size))
            if num_cached and not self._has_edge[block_ids[num_cached - 1]]:
                # The next position would need it: the network begins behind that.
                start, first_whole = SlotStart(num_computed + 1, num_computed + 1), num_cached + 1
        else:
            num_whole = whole.index(False) if False in whole else num_cached
            first_whole = 0
            start = SlotStart(num_whole * self._block_size, 0)
        lag = num_computed + 1 - start.num_done
        self._slots[slot] = _Slot(list(block_ids), lag, first_whole, start.num_done // self._block_size)
        return start

    def grow(self, row: PlanRow) -> None:
        """Take in the blocks that a row appends."""
        self._forget(row.new_block_ids)
        self._slots[row.slot].block_ids += row.new_block_ids

    def lag(self, slot: int) -> int:
        """Most positions it is behind the target before the step that comes."""
        return self._slots[slot].lag

    def catch_up(self, slot: int, num_positions: int) -> None:
        """So many positions are done, the oldest first."""
        record = self._slots[slot]
        record.lag = max(0, record.lag - num_positions)

    def skip(self, slot: int, lag: int, bound: int) -> None:
        """Leave out all but the last `lag` positions: the network attends to none of the others from now on.

        Args: bound: the positions from here on are not among those.
        """
        record = self._slots[slot]
        record.lag = lag
        record.first_whole = -(-bound // self._block_size)

    def pass_by(self, rows: Iterable[PlanRow]) -> None:
        """The target does a step of these rows that the network does not."""
        for row in rows:
            self._slots[row.slot].lag += row.num_query

    def settle(self, slot: int, num_computed: int) -> None:
        """The target has so many tokens for certain: blocks that are full of them may be whole."""
        record = self._slots[slot]
        if record.lag:
            return
        num_full = num_computed // self._block_size
        while record.num_marked < num_full:
            self._is_whole[record.block_ids[record.num_marked]] = record.num_marked >= record.first_whole
            record.num_marked += 1

    def is_whole(self, block_id: int) -> bool:
        """Whether the network did a block, and attended to all in front of it."""
        return bool(self._is_whole[block_id])

    def void(self, block_ids: Sequence[int]) -> None:
        """The target's part of these blocks will come from elsewhere."""
        self._forget(block_ids)
        for block_id in block_ids:
            self._has_edge[block_id] = False

    def adopt(self, block_ids: Sequence[int]) -> None:
        """All of these blocks came from elsewhere."""
        for block_id in block_ids:
            self._is_whole[block_id] = self._has_edge[block_id] = True

    def _forget(self, block_ids: Sequence[int]) -> None:
        """These blocks are to be computed anew."""
        for block_id in block_ids:
            self._is_whole[block_id] = False
            self._has_edge[block_id] = True
