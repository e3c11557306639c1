"""The groups of a node's blocks as a store knows them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from connectors.base import KVCaches, KVGroup
from connectors.host_blocks import HostBlocks


def namespace(name: str, fingerprint: str, block_size: int) -> str:
    """What the bytes of a group's blocks mean. Args: name, fingerprint: of the group. block_size: in tokens."""
    return f"{fingerprint}-{name}-{block_size}"


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """One of them. Attributes: blocks: as bytes in host memory."""

    namespace: str
    group: KVGroup
    blocks: HostBlocks

    @classmethod
    def all_of(cls, caches: KVCaches, num_threads: int) -> Sequence[Self]:
        """The target's first. Args: num_threads: that use a block at a time."""
        return [
            cls(
                namespace(group.name, group.fingerprint, caches.block_size),
                group,
                HostBlocks(group.blocks, num_threads),
            )
            for group in caches.groups
        ]
