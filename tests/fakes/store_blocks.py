"""Blocks for stores: bytes that follow from a number."""

import hashlib
import random

from connectors.save_failure import SaveFailure
from connectors.store import BlockStore

BLOCK_NBYTES = 10_000
NAMESPACE = "fingerprint-target-32"


def block_hash(number: int) -> bytes:
    """Of a block's number."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def content(number: int, nbytes: int = BLOCK_NBYTES) -> bytes:
    """Of the block."""
    return random.Random(number).randbytes(nbytes)


def save(store: BlockStore, number: int, namespace: str = NAMESPACE) -> SaveFailure | None:
    """Keep the block."""
    return store.save(namespace, block_hash(number), memoryview(content(number)))


def load(store: BlockStore, number: int, namespace: str = NAMESPACE) -> bytes | None:
    """What the store has for it; None for a miss."""
    buffer = bytearray(BLOCK_NBYTES)
    return bytes(buffer) if store.load(namespace, block_hash(number), memoryview(buffer)) else None


def has(store: BlockStore, number: int, namespace: str = NAMESPACE) -> bool:
    """Whether it can be found."""
    return store.find(namespace, [block_hash(number)]) == 1
