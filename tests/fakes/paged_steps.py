"""Attention steps over chosen pieces of sequences, whose blocks lie anywhere."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from server.model.attention import AttentionGroup, AttentionStep

Piece = tuple[int, int, int]
"""Slot, first position, number of positions."""


def block_table(num_slots: int, num_blocks: int, seed: int = 0) -> Tensor:
    """[slots, blocks] int32: blocks from 1 on, in random order."""
    order = torch.randperm(num_slots * num_blocks, generator=torch.Generator().manual_seed(seed))
    return (1 + order).view(num_slots, num_blocks).int()


def step_over(pieces: Sequence[Piece], table: Tensor, block_size: int, *, first: int = 0) -> AttentionStep:
    """A step that computes these pieces, a row and a group each, on the table's device.

    Args: first: position that every sequence sees from.
    """
    device = table.device
    places = [(slot, position) for slot, begin, count in pieces for position in range(begin, begin + count)]
    counts = [count for _, _, count in pieces]
    starts = [0, *accumulate(counts)][:-1]
    return AttentionStep(
        write_blocks=torch.tensor([int(table[slot, p // block_size]) for slot, p in places], device=device),
        write_offsets=torch.tensor([position % block_size for _, position in places], device=device),
        positions=torch.tensor([position for _, position in places], device=device),
        first_token=torch.tensor(starts, device=device),
        num_query=torch.tensor(counts, device=device),
        slots=torch.tensor([slot for slot, _, _ in pieces], device=device),
        block_table=table,
        starts=torch.full((len(table),), first, device=device),
        groups=tuple(
            AttentionGroup(row, 1, start, count, begin + count)
            for row, (start, (_, begin, count)) in enumerate(zip(starts, pieces, strict=True))
        ),
    )
