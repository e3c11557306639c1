"""The blocks of this node as a TCP connection reads and writes them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import torch

from connectors.base import KVCaches, KVGroup
from connectors.host_blocks import HostBlocks
from connectors.peer.layout import MAX_GROUPS, NodeLayout
from connectors.tcp.messages import MAX_SEGMENTS

CHUNK_NBYTES = 4 << 20
"""So much is summed up and sent at a time: with less, the other side has more messages to wait for; with more than the
system buffers, one side waits while the other one sums up."""
Segment: TypeAlias = tuple[int, int]
"""A group of this node, and a block of its own or, by its place, of a pull."""
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
        mean = sum(self.layout.groups[group].block_nbytes for group in groups) // len(groups)
        return max(1, min(MAX_SEGMENTS, CHUNK_NBYTES // max(1, mean)))

    @contextmanager
    def reading(self, segments: Sequence[Segment]) -> Iterator[list[memoryview | None]]:
        """The content of each segment; None where there is none."""
        with ExitStack() as stack:
            yield [
                self._slice(group, block_id) or stack.enter_context(self._blocks[group].reading(block_id))
                if self._groups[group].is_whole(block_id)
                else None
                for group, block_id in segments
            ]

    @contextmanager
    def writing(self, segments: Sequence[Segment]) -> Iterator[list[memoryview]]:
        """Buffers that are in these blocks once the context was left."""
        with ExitStack() as stack:
            yield [
                self._slice(group, block_id) or stack.enter_context(self._blocks[group].writing(block_id))
                for group, block_id in segments
            ]

    def _slice(self, group: int, block_id: int) -> memoryview | None:
        memory = self._memory[group]
        if memory is None:
            return None
        nbytes = self.layout.groups[group].block_nbytes
        return memory[block_id * nbytes : (block_id + 1) * nbytes]
