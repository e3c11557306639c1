"""Blocks in the memory of this process: those that the cache has no room for any more can be had again from there."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from connectors.config import Way
from connectors.save_failure import SaveFailure
from connectors.store import BlockStore
from connectors.store_config import StoreConfig
from server.config_values import ByteCount

_Key = tuple[str, bytes]


class MemoryConfig(StoreConfig):
    """Settings of blocks in memory."""

    max_bytes: ByteCount = Field(
        default=1 << 30, ge=1, description="most that all blocks take, such as 1GiB; those used longest ago go first"
    )

    def carriers(self, name: str, way: Way) -> frozenset[str]:
        """None: nobody else sees this memory."""
        return frozenset()

    def open_store(self) -> BlockStore:
        """An empty store."""
        return MemoryStore(self.max_bytes)


class MemoryStore:
    """Keeps what was found or saved last; implements connectors.store.BlockStore.

    Blocks are copied outside of the lock, by numpy, which gives up the interpreter lock for it. Whoever reads a block
    that is dropped meanwhile reads on. As a block is of no use without those in front of it, finding blocks leaves
    the first of them as the one used last.
    """

    def __init__(self, max_bytes: int) -> None:
        """Args: max_bytes: of the blocks, those that are being copied included."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[_Key, NDArray[np.uint8]] = OrderedDict()
        self._nbytes = 0

    def expect(self, namespace: str, block_nbytes: int) -> None:
        """Each block brings its size."""

    def find(self, namespace: str, hashes: Sequence[bytes]) -> int:
        """One look at a dictionary for each block until one is missing."""
        with self._lock:
            keys = [(namespace, block_hash) for block_hash in hashes]
            count = next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))
            for key in reversed(keys[:count]):
                self._blocks.move_to_end(key)
            return count

    def load(self, namespace: str, block_hash: bytes, into: memoryview) -> bool:
        """One copy; not a use, as whoever loads blocks has found them."""
        with self._lock:
            block = self._blocks.get((namespace, block_hash))
        if block is None or block.nbytes != into.nbytes:
            return False
        np.copyto(np.frombuffer(into, np.uint8), block)
        return True

    def save(self, namespace: str, block_hash: bytes, data: memoryview) -> SaveFailure | None:
        """One copy, into room that is made first; not kept if all of the room is taken by others being copied."""
        key = (namespace, block_hash)
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return None
            if not self._make_room(data.nbytes):
                return SaveFailure.FULL
            self._nbytes += data.nbytes
        block = np.frombuffer(data, np.uint8).copy()
        with self._lock:
            if key in self._blocks:  # by another thread, while this one copied
                self._nbytes -= block.nbytes
            else:
                self._blocks[key] = block
        return None

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            self._nbytes -= sum(block.nbytes for block in self._blocks.values())
            self._blocks.clear()

    def _make_room(self, nbytes: int) -> bool:
        """Drop blocks until there is room for so much more, or none is left. Returns: whether there is."""
        if nbytes > self._max_bytes:
            return False
        while self._nbytes + nbytes > self._max_bytes and self._blocks:
            _, dropped = self._blocks.popitem(last=False)
            self._nbytes -= dropped.nbytes
        return self._nbytes + nbytes <= self._max_bytes
