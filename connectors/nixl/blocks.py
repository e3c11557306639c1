"""The blocks of this node as NIXL's users read and write them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from connectors.base import KVCaches
from connectors.nixl.memory import Place, Region
from connectors.nixl.sums import word_sums, xxh3_sums
from connectors.peer.layout import MAX_GROUPS, NodeLayout

CHUNK_NBYTES = 16 << 20
"""So much is copied at a time to be summed up on a device."""


class NixlBlocks:
    """All groups of this node; used from several threads at a time."""

    def __init__(self, caches: KVCaches) -> None:
        groups = caches.groups[:MAX_GROUPS]
        self.layout = NodeLayout.of(caches)
        self.regions = [Region.of(group.blocks) for group in groups]
        self.device = caches.target.blocks.device
        self.place = Place.of(caches.target.blocks)
        self._blocks = [group.blocks.flatten(1).view(torch.uint8) for group in groups]
        self._is_whole: list[Callable[[int], bool]] = [group.is_whole for group in groups]
        self._stream = torch.cuda.Stream(self.device) if self.place.is_on_device else None
        self._written: torch.cuda.Event | None = None

    def register(self, nixl: Any) -> bytes:
        """Let others read them; the agent's thread's. Returns: what their agents need to know."""
        nixl.register_memory(
            [(region.address, region.nbytes, self.place.device_id, "") for region in self.regions], self.place.kind
        )
        metadata: bytes = nixl.get_agent_metadata()
        return metadata

    def mark(self) -> None:
        """What is queued on the device now goes before what is written to blocks; the step thread's."""
        if self._stream is not None:
            written = torch.cuda.Event()
            written.record(torch.cuda.current_stream(self.device))
            self._written = written

    def sums(
        self, group: int, block_ids: Sequence[int], use_words: bool, go_on: Callable[[], None]
    ) -> list[int | None]:
        """Checksums of blocks that nobody writes to; None for those without content.

        Args: use_words: instead of XXH3. go_on: raises if nobody wants them any more.
        """
        blocks = self._blocks[group]
        whole = [block_id for block_id in block_ids if self._is_whole[group](block_id)]
        at_a_time = max(1, CHUNK_NBYTES // self.regions[group].block_nbytes)
        found: dict[int, int] = {}
        for start in range(0, len(whole), at_a_time):
            go_on()
            part = whole[start : start + at_a_time]
            with self._own_stream():
                if use_words:
                    sums = word_sums(blocks[torch.tensor(part, device=self.device)])
                else:
                    sums = xxh3_sums([blocks[block_id] for block_id in part])
            found.update(zip(part, sums, strict=True))
        return [found.get(block_id) for block_id in block_ids]

    def store(self, group: int, block_ids: Sequence[int], content: Tensor) -> None:
        """Fill blocks, at least one; returns when it is done.

        Args: content: [len(block_ids), nbytes] uint8, where the blocks are.
        """
        blocks = self._blocks[group]
        if self._stream is None:
            for block_id, block in zip(block_ids, content, strict=True):
                blocks[block_id].copy_(block)  # on the CPU, index_copy_ goes byte by byte
            return
        with torch.cuda.stream(self._stream):
            if self._written is not None:
                self._stream.wait_event(self._written)
            blocks.index_copy_(0, torch.tensor(block_ids, device=self.device), content)
            self._stream.synchronize()

    def own_sums(self, content: Tensor, use_words: bool) -> list[int]:
        """Checksums of what has come. Args: content: [n, nbytes] uint8, contiguous."""
        with self._own_stream():
            return word_sums(content) if use_words else xxh3_sums(list(content))

    def _own_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
