"""Blocks of one size made from blocks of another."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from connectors.peer_layout import GroupLayout

STAGING_NBYTES = 32 << 20


class Staging:
    """Memory for blocks as another node has them, enough for some of ours.

        tokens      0       8       16      24      32      40      48
        theirs      |   0   |   1   |   2   |   3   |   4   |   5   |
        ours        |     0     |     1     |     2     |     3     |
                                |<--------->|                          block 1 is cut from theirs 1 and 2

    Attributes:
        first, count: of their blocks. num_cut: how many of ours they are enough for.
    """

    def __init__(self, theirs: GroupLayout, their_size: int, our_size: int, first_block: int, num_wanted: int) -> None:
        """Args: theirs: the target's group there. their_size, our_size: of a block, in tokens.

        first_block, num_wanted: of ours.
        """
        self._our_size, self._their_size = our_size, their_size
        self._first_block = first_block
        num_fitting = STAGING_NBYTES // (theirs.block_nbytes * our_size // their_size + 1)
        round_up = their_size // math.gcd(their_size, our_size)  # so that most pieces end where one of theirs does
        self.num_cut = min(num_wanted, -(-max(1, num_fitting) // round_up) * round_up)
        self.first = first_block * our_size // their_size
        self.count = -(-(first_block + self.num_cut) * our_size // their_size) - self.first
        dtype: torch.dtype = getattr(torch, theirs.dtype)
        self._blocks = torch.empty((self.count, *theirs.shape), dtype=dtype)
        self._bytes = self._blocks.flatten(1).view(torch.uint8).numpy()

    @contextmanager
    def writing(self, segments: Sequence[tuple[int, int]]) -> Iterator[list[memoryview]]:
        """Buffers for their blocks, by place."""
        yield [self._bytes[place].data for _, place in segments]

    def cut(self) -> Iterator[memoryview]:
        """Our blocks, one after the other."""
        layers, heads = self._blocks.shape[1:3]
        tokens = self._blocks.permute(1, 2, 0, 3, 4).reshape(layers, heads, self.count * self._their_size, -1)
        start = self._first_block * self._our_size - self.first * self._their_size
        for place in range(self.num_cut):
            block = tokens[:, :, start + place * self._our_size : start + (place + 1) * self._our_size].contiguous()
            yield block.flatten().view(torch.uint8).numpy().data

    def cut_from(self, places: Iterable[int]) -> frozenset[int]:
        """Places of our blocks that have tokens of these blocks of theirs."""
        found: set[int] = set()
        for place in places:
            start = (self.first + place) * self._their_size
            first = start // self._our_size
            last = (start + self._their_size - 1) // self._our_size
            found.update(range(first - self._first_block, last - self._first_block + 1))
        return frozenset(found & set(range(self.num_cut)))
