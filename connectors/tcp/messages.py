"""What two nodes say to each other over TCP.

The node that wants blocks connects, says Hello and is told Welcome or Refused. Then it sends Pull, and gets one Data
after the other until it has all blocks, or Failed; Keep and Release have no answer.

Every message is a header, kind and length, then so many bytes, then zeros up to a multiple of 64. Numbers are unsigned
and little-endian, texts are UTF-8 behind their length. Behind a Data message come the bytes that it describes, which
are not in its length. Nothing is believed: what is too long, ends too early or too late is a ProtocolError.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, TypeAlias

from connectors.peer.layout import MAX_GROUPS, GroupLayout, NodeLayout
from connectors.peer.leases import LEASE_NBYTES

PROTOCOL_VERSION = 2
MAGIC = b"outrider"
MAX_MESSAGE_NBYTES = 1 << 16
MAX_TEXT_NBYTES = 512
MAX_DIMS = 8
MAX_SEGMENTS = 1000
"""Most segments in a Data message; few enough for one system call."""
MAX_KEPT = 1024
"""Most leases in a Keep message."""
HASH_NBYTES = 32
ALIGNMENT = 64
"""What a message takes is a multiple of this: behind it, the system copies blocks faster than from odd places."""

HEADER = struct.Struct("<B3xI")


class ProtocolError(Exception):
    """The other side says what it must not."""


class Kind(IntEnum):
    """What a message is."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    PULL = 4
    DATA = 5
    FAILED = 6
    KEEP = 7
    RELEASE = 8


class _Reader:
    """Takes a message apart."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    def bytes(self, count: int) -> bytes:
        start, self._place = self._place, self._place + count
        if self._place > len(self._data):
            raise ProtocolError("a message ends too early")
        return self._data[start : self._place]

    def number(self, nbytes: int, at_most: int) -> int:
        value = int.from_bytes(self.bytes(nbytes), "little")
        if value > at_most:
            raise ProtocolError(f"a number is {value}, at most {at_most} is allowed")
        return value

    def text(self) -> str:
        try:
            return self.bytes(self.number(2, MAX_TEXT_NBYTES)).decode()
        except UnicodeDecodeError as error:
            raise ProtocolError("a text is no UTF-8") from error

    def end(self) -> None:
        if self._place != len(self._data):
            raise ProtocolError("a message goes on behind its end")


def _text(text: str) -> bytes:
    encoded = text.encode()[:MAX_TEXT_NBYTES].decode(errors="ignore").encode()
    return struct.pack("<H", len(encoded)) + encoded


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message. Attributes: engine_id: of the node that is meant."""

    engine_id: str
    version: int = PROTOCOL_VERSION
    kind: ClassVar[Kind] = Kind.HELLO

    def encode(self) -> bytes:
        """The message without its header."""
        return MAGIC + struct.pack("<H", self.version) + _text(self.engine_id)

    @classmethod
    def decode(cls, data: bytes) -> "Hello":
        """Raises: ProtocolError. Of another version, only the version is read."""
        reader = _Reader(data)
        if reader.bytes(len(MAGIC)) != MAGIC:
            raise ProtocolError("this is no node of ours")
        version = reader.number(2, 0xFFFF)
        if version != PROTOCOL_VERSION:
            return cls("", version)
        hello = cls(reader.text(), version)
        reader.end()
        return hello


@dataclass(frozen=True, slots=True)
class Welcome:
    """The node is the one that was meant, and has such blocks."""

    layout: NodeLayout
    kind: ClassVar[Kind] = Kind.WELCOME

    def encode(self) -> bytes:
        """The message without its header."""
        parts = [struct.pack("<IB", self.layout.block_size, len(self.layout.groups))]
        for group in self.layout.groups:
            shape = struct.pack(f"<B{len(group.shape)}I", len(group.shape), *group.shape)
            parts += [_text(group.name), _text(group.fingerprint), _text(group.dtype), shape]
            parts.append(struct.pack("<Q", group.block_nbytes))
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> "Welcome":
        """Raises: ProtocolError."""
        reader = _Reader(data)
        block_size = reader.number(4, 1 << 16)
        groups = tuple(
            GroupLayout(
                name=reader.text(),
                fingerprint=reader.text(),
                dtype=reader.text(),
                shape=tuple(reader.number(4, (1 << 32) - 1) for _ in range(reader.number(1, MAX_DIMS))),
                block_nbytes=reader.number(8, 1 << 40),
            )
            for _ in range(reader.number(1, MAX_GROUPS))
        )
        reader.end()
        if not block_size or not groups:
            raise ProtocolError("a node without blocks")
        return cls(NodeLayout(block_size, groups))


@dataclass(frozen=True, slots=True)
class Refused:
    """The node is another one, or speaks another version: the connection is of no use."""

    reason: str
    kind: ClassVar[Kind] = Kind.REFUSED

    def encode(self) -> bytes:
        """The message without its header."""
        return _text(self.reason)

    @classmethod
    def decode(cls, data: bytes) -> "Refused":
        """Raises: ProtocolError."""
        reader = _Reader(data)
        reason = reader.text()
        reader.end()
        return cls(reason)


@dataclass(frozen=True, slots=True)
class Failed(Refused):
    """These blocks can not be had; the connection is as good as before."""

    kind: ClassVar[Kind] = Kind.FAILED


@dataclass(frozen=True, slots=True)
class Pull:
    """Blocks that are wanted.

    Attributes:
        first, count: of the lease's blocks.
        groups: bit i for the group in place i of the node's layout.
        last_hash: the last of these blocks has to have it; empty if who reads can not tell.
    """

    lease_id: str
    first: int
    count: int
    groups: int
    last_hash: bytes
    kind: ClassVar[Kind] = Kind.PULL

    def encode(self) -> bytes:
        """The message without its header."""
        numbers = struct.pack("<IIBB", self.first, self.count, self.groups, len(self.last_hash))
        return bytes.fromhex(self.lease_id) + numbers + self.last_hash

    @classmethod
    def decode(cls, data: bytes) -> "Pull":
        """Raises: ProtocolError."""
        reader = _Reader(data)
        lease_id = reader.bytes(LEASE_NBYTES).hex()
        first, count = (reader.number(4, (1 << 31) - 1) for _ in range(2))
        groups = reader.number(1, 0xFF)
        last_hash = reader.bytes(reader.number(1, HASH_NBYTES))
        reader.end()
        if len(last_hash) not in (0, HASH_NBYTES) or not count or not groups:
            raise ProtocolError("a pull of nothing, or of a hash of another length")
        return cls(lease_id, first, count, groups, last_hash)


@dataclass(frozen=True, slots=True)
class Data:
    """What follows: the next segments of a pull, each a part of one group's block, in the order of `parts.slots`.

    Attributes:
        checksums: of each segment; None for one that has no content, and is not sent.
    """

    checksums: tuple[int | None, ...]
    kind: ClassVar[Kind] = Kind.DATA
    _entry: ClassVar[struct.Struct] = struct.Struct("<?Q")

    def encode(self) -> bytes:
        """The message without its header."""
        return b"".join(self._entry.pack(checksum is not None, checksum or 0) for checksum in self.checksums)

    @classmethod
    def decode(cls, data: bytes) -> "Data":
        """Raises: ProtocolError."""
        count, rest = divmod(len(data), cls._entry.size)
        if rest or not 0 < count <= MAX_SEGMENTS:
            raise ProtocolError("checksums of another length")
        return cls(tuple(value if is_there else None for is_there, value in cls._entry.iter_unpack(data)))


@dataclass(frozen=True, slots=True)
class Keep:
    """A sign of life: these leases are still wanted."""

    lease_ids: tuple[str, ...]
    kind: ClassVar[Kind] = Kind.KEEP

    def encode(self) -> bytes:
        """The message without its header."""
        return b"".join(map(bytes.fromhex, self.lease_ids))

    @classmethod
    def decode(cls, data: bytes) -> "Keep":
        """Raises: ProtocolError."""
        if len(data) % LEASE_NBYTES or len(data) > MAX_KEPT * LEASE_NBYTES:
            raise ProtocolError("leases of another length")
        return cls(tuple(data[i : i + LEASE_NBYTES].hex() for i in range(0, len(data), LEASE_NBYTES)))


@dataclass(frozen=True, slots=True)
class Release(Keep):
    """These leases are not wanted any more: all was read, or nobody waits for it."""

    kind: ClassVar[Kind] = Kind.RELEASE


Message: TypeAlias = Hello | Welcome | Refused | Failed | Pull | Data | Keep | Release

_CLASSES: dict[int, type[Message]] = {
    cls.kind: cls for cls in (Hello, Welcome, Refused, Failed, Pull, Data, Keep, Release)
}


def padded(nbytes: int) -> int:
    """Bytes of a message with header and zeros. Args: nbytes: without."""
    return -(-(HEADER.size + nbytes) // ALIGNMENT) * ALIGNMENT


def pack(message: Message) -> bytes:
    """A message with its header."""
    body = message.encode()
    assert len(body) <= MAX_MESSAGE_NBYTES
    return (HEADER.pack(message.kind, len(body)) + body).ljust(padded(len(body)), b"\0")


def unpack_header(start: bytearray) -> tuple[Kind, int]:
    """Kind and length of the message that begins so. Raises: ProtocolError."""
    number, nbytes = HEADER.unpack_from(start)
    if number not in _CLASSES or nbytes > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"a message of kind {number} and {nbytes} bytes")
    return Kind(number), nbytes


def unpack(kind: Kind, body: bytes) -> Message:
    """The message. Raises: ProtocolError."""
    return _CLASSES[kind].decode(body)


def leases_in_messages(lease_ids: Sequence[str], cls: type[Keep]) -> bytes:
    """As many messages as these leases need, packed."""
    return b"".join(pack(cls(tuple(lease_ids[i : i + MAX_KEPT]))) for i in range(0, len(lease_ids), MAX_KEPT))
