"""What a node's blocks look like, and whether those of two nodes can be exchanged."""

from collections.abc import Sequence
from dataclasses import dataclass

from connectors.base import KVCaches

MAX_GROUPS = 8


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One group of a node. Attributes: shape: of a block."""

    name: str
    fingerprint: str
    dtype: str
    shape: tuple[int, ...]
    block_nbytes: int


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """All groups of a node, the target's first."""

    block_size: int
    groups: tuple[GroupLayout, ...]

    @classmethod
    def of(cls, caches: KVCaches) -> "NodeLayout":
        """That of this node."""
        groups = tuple(
            GroupLayout(
                group.name,
                group.fingerprint,
                str(group.blocks.dtype).removeprefix("torch."),
                tuple(group.blocks.shape[1:]),
                group.block_nbytes,
            )
            for group in caches.groups[:MAX_GROUPS]
        )
        return cls(caches.block_size, groups)

    @property
    def target(self) -> GroupLayout:
        """The target's group."""
        return self.groups[0]


def mismatch(ours: NodeLayout, theirs: NodeLayout) -> str | None:
    """Why the target's KV of two nodes can not be exchanged, with both values; None if it can."""
    mine, other = ours.target, theirs.target
    for what, here, there in (
        ("fingerprint", mine.fingerprint, other.fingerprint),
        ("dtype", mine.dtype, other.dtype),
        ("geometry [layers, heads, 2 * head_dim]", _geometry(mine), _geometry(other)),
    ):
        if here != there:
            return f"{what}: {here} here, {there} there"
    for side, node in (("here", ours), ("there", theirs)):
        if len(node.target.shape) != 4 or node.target.shape[2] != node.block_size:
            return f"shape of a block {side} is {list(node.target.shape)}, with {node.block_size} tokens"
    return None


def _geometry(group: GroupLayout) -> list[int]:
    return [*group.shape[:2], *group.shape[3:]]


def shared_groups(ours: NodeLayout, theirs: NodeLayout) -> Sequence[tuple[int, int]]:
    """Places of the groups, here and there, that can be exchanged between nodes without a `mismatch`.

    The target's comes first, the others in the order of that node. Between different block sizes it is the only one.
    """
    pairs = [(0, 0)]
    if ours.block_size == theirs.block_size:
        places = {group: index for index, group in enumerate(ours.groups) if index}
        pairs += [(places[group], index) for index, group in enumerate(theirs.groups) if index and group in places]
    return pairs
