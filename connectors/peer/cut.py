"""Blocks of one size made from blocks of another."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """Which blocks of another node ours are made of.

        tokens      0       8       16      24      32      40      48
        theirs      |   0   |   1   |   2   |   3   |   4   |   5   |
        ours        |     0     |     1     |     2     |     3     |
                                |<--------->|                          block 1 is cut from theirs 1 and 2

    Attributes:
        their_size, our_size: of a block, in tokens. first_block, num_blocks: of ours.
    """

    their_size: int
    our_size: int
    first_block: int
    num_blocks: int

    @property
    def first(self) -> int:
        """The first of theirs."""
        return self.first_block * self.our_size // self.their_size

    @property
    def count(self) -> int:
        """How many of theirs."""
        return -(-(self.first_block + self.num_blocks) * self.our_size // self.their_size) - self.first

    @property
    def _start(self) -> int:
        """Tokens of their first one that belong to others of ours."""
        return self.first_block * self.our_size - self.first * self.their_size

    def fitting(self, num_theirs: int) -> "Cut":
        """As many of its leading blocks as so many of theirs are enough for; see `least`."""
        num_blocks = (num_theirs * self.their_size - self._start) // self.our_size
        return Cut(self.their_size, self.our_size, self.first_block, min(num_blocks, self.num_blocks))

    @staticmethod
    def least(their_size: int, our_size: int) -> int:
        """How many of theirs are enough for any one of ours."""
        return (our_size + their_size - math.gcd(their_size, our_size) - 1) // their_size + 1

    def cut(self, theirs: Tensor) -> Tensor:
        """Ours. Args: theirs: [count, layers, heads, their_size, width].

        Returns: [num_blocks, layers, heads, our_size, width], contiguous.
        """
        layers, heads, _, width = theirs.shape[1:]
        tokens = theirs.permute(1, 2, 0, 3, 4).reshape(layers, heads, self.count * self.their_size, width)
        ours = tokens[:, :, self._start : self._start + self.num_blocks * self.our_size]
        return ours.reshape(layers, heads, self.num_blocks, self.our_size, width).permute(2, 0, 1, 3, 4).contiguous()

    def cut_from(self, places: Iterable[int]) -> frozenset[int]:
        """Places of ours that have tokens of these of theirs."""
        found: set[int] = set()
        for place in places:
            start = (self.first + place) * self.their_size
            first = start // self.our_size
            last = (start + self.their_size - 1) // self.our_size
            found.update(range(first - self.first_block, last - self.first_block + 1))
        return frozenset(found & set(range(self.num_blocks)))
