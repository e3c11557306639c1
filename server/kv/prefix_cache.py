"""Names for full blocks: a chain of digests that is the same in every process."""

import hashlib
import struct
from collections.abc import Sequence

from server.kv.block_pool import BlockPool


def root_hash(fingerprint: bytes, salt: str) -> bytes:
    """The parent of a sequence's first block; differs between models, KV formats and salts."""
    encoded = salt.encode()
    return hashlib.sha256(struct.pack("<QQ", len(fingerprint), len(encoded)) + fingerprint + encoded).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of a full block: its parent's digest, then its ids as little-endian uint32."""
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


class BlockHashes:
    """The hash chain of one growing token sequence, extended as blocks fill up."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self._block_size = block_size
        self._root = root
        self._hashes: list[bytes] = []

    def of_size(self, block_size: int) -> "BlockHashes":
        """Those of the same sequence in blocks of another size, as a node that has such blocks knows them."""
        return BlockHashes(self._root, block_size)

    def up_to(self, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """The hashes of the first `num_blocks` full blocks of `token_ids`, which only ever grows."""
        for i in range(len(self._hashes), num_blocks):
            parent = self._hashes[-1] if self._hashes else self._root
            self._hashes.append(block_hash(parent, token_ids[i * self._block_size : (i + 1) * self._block_size]))
        return self._hashes[:num_blocks]


def longest_hit(pool: BlockPool, hashes: Sequence[bytes]) -> list[int]:
    """Blocks that hold the longest cached prefix of a hash chain."""
    hit: list[int] = []
    for digest in hashes:
        block_id = pool.lookup(digest)
        if block_id is None:
            break
        hit.append(block_id)
    return hit
