"""Memory that blocks are read to, before anything is known of what has come."""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from connectors.nixl.memory import Place, Region, first_descriptors
from connectors.waiting import Waiting

ALIGNMENT = 256
"""Bytes; what is there can be looked at as words of any width."""


class Lane:
    """Memory for the blocks of one read.

    Attributes: parts: of each group, [blocks, nbytes] uint8. descriptors: of each group, that of its first block.
    """

    def __init__(self, parts: Sequence[Tensor], descriptors: Sequence[int]) -> None:
        self.parts = parts
        self.descriptors = descriptors


class Staging:
    """Lanes of equal size; each is used by one load at a time.

    Attributes: memory: all of it. regions: its descriptors. blocks_per_lane: of all groups.
    """

    def __init__(
        self, block_nbytes: Sequence[int], device: torch.device, *, num_lanes: int, nbytes: int, least: int
    ) -> None:
        """Args: block_nbytes: of each group. nbytes: of all lanes. least: blocks that a lane must have room for."""
        self.blocks_per_lane = max(least, nbytes // num_lanes // sum(block_nbytes))
        sizes = [-(-self.blocks_per_lane * width // ALIGNMENT) * ALIGNMENT for width in block_nbytes]
        self.memory = torch.empty(num_lanes * sum(sizes), dtype=torch.uint8, device=device)
        self.place = Place.of(self.memory)
        parts, start = list[Tensor](), 0
        for _ in range(num_lanes):
            for width, size in zip(block_nbytes, sizes, strict=True):
                content = self.memory[start : start + self.blocks_per_lane * width]
                parts.append(content.view(self.blocks_per_lane, width))
                start += size
        self.regions = [Region.of(part) for part in parts]
        firsts = first_descriptors(self.regions)
        count = len(block_nbytes)
        self._lock = threading.Lock()
        self._waiting: deque[Future[Lane]] = deque()
        self._free = [Lane(parts[i : i + count], firsts[i : i + count]) for i in range(0, len(parts), count)]

    def take(self, waiting: Waiting) -> Lane:
        """A lane that nothing is written to any more. Raises: see Waiting."""
        taken: Future[Lane] = Future()
        with self._lock:
            if self._free:
                taken.set_result(self._free.pop())
            else:
                self._waiting.append(taken)
        try:
            return waiting.result(taken)
        except BaseException:
            if not taken.cancelled():  # it came just now
                self.give_back(taken.result())
            raise

    def take_nowait(self) -> Lane | None:
        """A lane, or None if there is none now."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, lane: Lane) -> None:
        """Nothing is written to it any more; from any thread."""
        with self._lock:
            while self._waiting:
                first = self._waiting.popleft()
                if first.set_running_or_notify_cancel():
                    first.set_result(lane)
                    return
            self._free.append(lane)
