"""Flat tokens of several sequences, as attention over their blocks takes them."""

from dataclasses import dataclass

from torch import Tensor

from proposers.network import BatchMemory
from server.model.attention import AttentionGroup, AttentionStep


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """T tokens of N rows; device tensors.

    Attributes:
        slots, positions: [T] int64. is_real: [T] bool; what is not has its K and V written to the null block.
        rows, first_token, num_query: [N] int64, the slot and the tokens of each row. groups: the rows, in order.
    """

    slots: Tensor
    positions: Tensor
    is_real: Tensor
    rows: Tensor
    first_token: Tensor
    num_query: Tensor
    groups: tuple[AttentionGroup, ...]

    def step(self, memory: BatchMemory, starts: Tensor | None) -> tuple[Tensor, AttentionStep]:
        """Their positions, 0 for those that are not real, and how to attend.

        Args: starts: [S + 1] int64, by slot, the first position that is attended to; None for all.
        """
        positions = self.positions * self.is_real
        step = AttentionStep(
            write_blocks=blocks_of(memory, self.slots, positions) * self.is_real,
            write_offsets=positions % memory.block_size,
            positions=positions,
            first_token=self.first_token,
            num_query=self.num_query,
            slots=self.rows,
            block_table=memory.block_table,
            groups=self.groups,
            starts=starts,
        )
        return positions, step


def blocks_of(memory: BatchMemory, slots: Tensor, positions: Tensor) -> Tensor:
    """[T] int64, the blocks that hold positions of slots; 0 where there is none yet."""
    index = (positions // memory.block_size).clamp(max=memory.block_table.shape[1] - 1)
    return memory.block_table[slots, index].long()
