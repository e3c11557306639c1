"""KV blocks as bytes in host memory: the blocks themselves on the CPU, copies of them elsewhere."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

WHOLE = slice(None)


class HostBlocks:
    """Buffers for reading and writing the blocks of a group; used from several threads at a time."""

    def __init__(self, blocks: Tensor, num_threads: int) -> None:
        """Args: blocks: [num_blocks, ...], each block contiguous. num_threads: that use a block at a time."""
        self._blocks = blocks.flatten(1).view(torch.uint8)
        self._is_host = blocks.device.type == "cpu"
        self._stages: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._stream: torch.cuda.Stream | None = None
        self._written: torch.cuda.Event | None = None
        if not self._is_host:
            self._stream = torch.cuda.Stream(blocks.device)
            for _ in range(num_threads):
                self._stages.put(torch.empty(self._blocks.shape[1], dtype=torch.uint8, pin_memory=True))

    def mark(self) -> None:
        """Whatever is read from now on is as the device will have it after what is queued there; the step thread's."""
        if self._stream is not None:
            self._written = torch.cuda.Event()
            self._written.record(torch.cuda.current_stream(self._stream.device))

    @contextmanager
    def reading(self, block_id: int, part: slice = WHOLE) -> Iterator[memoryview]:
        """The bytes of a block, or of a part of it, that nobody writes to meanwhile."""
        block = self._blocks[block_id, part]
        if self._is_host:
            yield block.numpy().data
            return
        with self._stage() as stage:
            copy = stage[: len(block)]
            self._copy(block, copy)
            yield copy.numpy().data

    @contextmanager
    def writing(self, block_id: int, part: slice = WHOLE) -> Iterator[memoryview]:
        """A buffer that is in the block, or in a part of it, once the context was left."""
        block = self._blocks[block_id, part]
        if self._is_host:
            yield block.numpy().data
            return
        with self._stage() as stage:
            copy = stage[: len(block)]
            yield copy.numpy().data
            self._copy(copy, block)

    @contextmanager
    def _stage(self) -> Iterator[Tensor]:
        stage = self._stages.get()
        try:
            yield stage
        finally:
            self._stages.put(stage)

    def _copy(self, source: Tensor, to: Tensor) -> None:
        """Between host and device, on a stream of its own; returns when it is done."""
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            if self._written is not None:
                self._stream.wait_event(self._written)
            to.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        done.synchronize()
