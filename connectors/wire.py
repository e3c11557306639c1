"""The form of a block outside of an engine: a header that says what it is, then its bytes.

    offset  bytes
         0     12   magic, b"outrider-kv\\n"
        12      4   format version, FORMAT_VERSION
        16     32   namespace: `namespace_digest` of what the bytes mean
        48     32   hash of the block's tokens and of all in front of them
        80      8   bytes behind the header
        88      8   their XXH3-64
        96          the block, as it lies in the cache

Numbers are unsigned and little-endian. A reader knows what every field has to be: none is believed, each is compared.
"""

import hashlib
import struct
from functools import lru_cache

from xxhash import xxh3_64_intdigest

FORMAT_VERSION = 1
MAGIC = b"outrider-kv\n"
HASH_NBYTES = 32

_HEADER = struct.Struct("<12sI32s32sQQ")
HEADER_NBYTES = _HEADER.size


def checksum(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64; without the interpreter lock for more than 64 KiB."""
    return xxh3_64_intdigest(data)


@lru_cache(maxsize=256)
def namespace_digest(namespace: str) -> bytes:
    """32 bytes that stand for a namespace in this version of the format; another version never looks there."""
    return hashlib.sha256(struct.pack("<I", FORMAT_VERSION) + namespace.encode()).digest()


def pack_header(namespace: str, block_hash: bytes, data: memoryview) -> bytes:
    """What goes in front of a block. Args: block_hash: 32 bytes. Raises: ValueError on another length."""
    if len(block_hash) != HASH_NBYTES:
        raise ValueError(f"a block's hash has {HASH_NBYTES} bytes, got {len(block_hash)}")
    return _HEADER.pack(MAGIC, FORMAT_VERSION, namespace_digest(namespace), block_hash, data.nbytes, checksum(data))


def find_fault(header: bytes | bytearray, namespace: str, block_hash: bytes, data: memoryview) -> str | None:
    """Why these are not the header and the bytes of a block, with what is there and what should be; None if they are.

    Args: header: HEADER_NBYTES long.
    """
    magic, version, digest, found_hash, nbytes, found_sum = _HEADER.unpack(header)
    if magic != MAGIC:
        return f"it begins with {magic!r} instead of {MAGIC!r}"
    if version != FORMAT_VERSION:
        return f"it has format version {version}, this is version {FORMAT_VERSION}"
    if digest != namespace_digest(namespace):
        return f"it is of namespace {digest.hex()} instead of {namespace_digest(namespace).hex()}"
    if found_hash != block_hash:
        return f"it holds block {found_hash.hex()} instead of {block_hash.hex()}"
    if nbytes != data.nbytes:
        return f"its block has {nbytes} bytes instead of {data.nbytes}"
    if found_sum != (computed := checksum(data)):
        return f"its checksum is {computed:016x} instead of {found_sum:016x}"
    return None
