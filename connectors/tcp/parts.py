"""The pieces that blocks are sent in."""

from collections.abc import Sequence
from typing import TypeAlias

from connectors.peer.layout import NodeLayout

CHUNK_NBYTES = 4 << 20
"""So much is summed up and sent at a time: with less, the other side has more messages to wait for; with more than the
system buffers, one side waits while the other one sums up."""
Slot: TypeAlias = tuple[int, int]
"""A group, and a part of a block of it."""
Segment: TypeAlias = tuple[int, int, int]
"""A group of this node, a block of its own or, by its place, of a pull, and a part of that."""


def slots(layout: NodeLayout, groups: Sequence[int]) -> list[Slot]:
    """What is sent of each block, in this order. Args: layout, groups: of the node that has the blocks."""
    return [(group, part) for group in groups for part in range(-(-layout.groups[group].block_nbytes // CHUNK_NBYTES))]


def part_of(nbytes: int, part: int) -> slice:
    """Where a part of a block of so many bytes lies in it."""
    return slice(part * CHUNK_NBYTES, min((part + 1) * CHUNK_NBYTES, nbytes))
