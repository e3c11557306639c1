"""The blocks of this node as a TCP connection reads and writes them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from connectors.base import KVCaches, KVGroup
from connectors.host_blocks import HostBlocks
from connectors.peer.layout import MAX_GROUPS, NodeLayout
from connectors.tcp.messages import MAX_SEGMENTS
from connectors.tcp.parts import CHUNK_NBYTES, Segment, part_of, slots

NUM_STAGES = 16
"""Blocks that are copied to or from a device at a time."""


class LocalBlocks:
    """All groups of this node; used from several threads at a time."""

    def __init__(self, caches: KVCaches) -> None:
        self.layout = NodeLayout.of(caches)
        self._groups: Sequence[KVGroup] = caches.groups[:MAX_GROUPS]
        self._blocks = [HostBlocks(group.blocks, NUM_STAGES) for group in self._groups]
        self._is_host = caches.target.blocks.device.type == "cpu"
        self._memory = [self._flat(group) for group in self._groups]

    @staticmethod
    def _flat(group: KVGroup) -> memoryview | None:
        """All blocks as they lie in host memory, from which slices are taken at little cost."""
        if group.blocks.device.type != "cpu" or not group.blocks.is_contiguous():
            return None
        return group.blocks.flatten().view(torch.uint8).numpy().data

    def mark(self) -> None:
        """What is queued on the device now goes before what is written to blocks; the step thread's."""
        for blocks in self._blocks:
            blocks.mark()

    def num_segments(self, groups: Sequence[int]) -> int:
        """How many segments of these groups, in turns, go into a chunk.

        On a device only one: a thread uses one stage at a time, or all may wait for all.
        """
        if not self._is_host:
            return 1
        total = sum(self.layout.groups[group].block_nbytes for group in groups)
        mean = total // len(slots(self.layout, groups))
        return max(1, min(MAX_SEGMENTS, CHUNK_NBYTES // max(1, mean)))

    @contextmanager
    def reading(self, segments: Sequence[Segment]) -> Iterator[list[memoryview | None]]:
        """The content of each segment; None where there is none."""
        with ExitStack() as stack:
            yield [
                self._slice(segment) or stack.enter_context(self._blocks[segment[0]].reading(*self._place(segment)))
                if self._groups[segment[0]].is_whole(segment[1])
                else None
                for segment in segments
            ]

    @contextmanager
    def writing(self, segments: Sequence[Segment]) -> Iterator[list[memoryview]]:
        """Buffers that are in these blocks once the context was left."""
        with ExitStack() as stack:
            yield [
                self._slice(segment) or stack.enter_context(self._blocks[segment[0]].writing(*self._place(segment)))
                for segment in segments
            ]

    def fill(self, block_id: int, data: memoryview) -> None:
        """Have these bytes in a block of the target's."""
        with self._blocks[0].writing(block_id) as buffer:
            buffer[:] = data

    def _place(self, segment: Segment) -> tuple[int, slice]:
        """A block, and which of its bytes."""
        group, block_id, part = segment
        return block_id, part_of(self.layout.groups[group].block_nbytes, part)

    def _slice(self, segment: Segment) -> memoryview | None:
        memory = self._memory[segment[0]]
        if memory is None:
            return None
        block_id, part = self._place(segment)
        begin = block_id * self.layout.groups[segment[0]].block_nbytes
        return memory[begin + part.start : begin + part.stop]
