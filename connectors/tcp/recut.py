"""Memory for blocks of another size, which ours are cut from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from connectors.peer.cut import Cut
from connectors.peer.layout import GroupLayout
from connectors.tcp.parts import Segment, part_of

STAGING_NBYTES = 32 << 20


class Staging:
    """Enough of their blocks for some of ours. Attributes: cut: which."""

    def __init__(self, theirs: GroupLayout, their_size: int, our_size: int, first_block: int, num_wanted: int) -> None:
        """Args: theirs: the target's group there. their_size, our_size: of a block, in tokens.

        first_block, num_wanted: of ours.
        """
        num_blocks = max(STAGING_NBYTES // theirs.block_nbytes, Cut.least(their_size, our_size))
        self.cut = Cut(their_size, our_size, first_block, num_wanted).fitting(num_blocks)
        dtype: torch.dtype = getattr(torch, theirs.dtype)
        self._blocks = torch.empty((self.cut.count, *theirs.shape), dtype=dtype)
        self._bytes = self._blocks.flatten(1).view(torch.uint8).numpy()

    @contextmanager
    def writing(self, segments: Sequence[Segment]) -> Iterator[list[memoryview]]:
        """Buffers for parts of their blocks, by place."""
        yield [self._bytes[place, part_of(self._bytes.shape[1], part)].data for _, place, part in segments]

    def ours(self) -> Iterator[memoryview]:
        """Our blocks, one after the other."""
        for block in self.cut.cut(self._blocks):
            yield block.flatten().view(torch.uint8).numpy().data
