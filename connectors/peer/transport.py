"""How blocks get from one node to another: what a peer connector asks of that which moves them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from connectors.base import HashBlocks, KVCaches
from connectors.peer.leases import LeaseTable
from server.kv_handle import KVHandle


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """Blocks to be fetched.

    Attributes:
        seq_id: names the load. source: whose lease to read from; checked.
        block_ids: to write to; they stand for the tokens from `first_block * block_size` on, with this node's size.
        hashes: of the same; the other node is to compare them with its own.
        until_s: when it has failed, on the engine's clock.
        hash_blocks: the hashes of the prompt's blocks if they had so many tokens, for a node that has such blocks.
    """

    seq_id: int
    source: KVHandle
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    first_block: int
    until_s: float
    hash_blocks: HashBlocks | None = field(default=None, compare=False)

    def hashes_there(self, block_size: int) -> Sequence[bytes]:
        """What a node whose blocks have this size has to have as their hashes; empty texts if nobody can tell."""
        if self.hash_blocks is None:
            return [b""] * (self.source.num_tokens // block_size)
        return self.hash_blocks(block_size)


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """How a load has ended; nothing writes to its blocks any more.

    Attributes:
        bad: blocks whose content is not what was asked for. complete: blocks that were filled in all groups.
    """

    bad: frozenset[int]
    complete: tuple[int, ...] = ()


class PeerTransport(Protocol):
    """Moves blocks, on threads of its own; no method but `close` waits for them.

    It tells the node that a load reads from that it is alive, and gives the lease back once no load of this node reads
    from it any more, well or not.
    """

    @property
    def address(self) -> str:
        """What other nodes are to use to find this one; known from the start."""

    def refusal(self, source: KVHandle) -> str | None:
        """Why a node is not to be asked, from what is known here; None if it may be."""

    def start(self, caches: KVCaches, leases: LeaseTable) -> None:
        """Serve these blocks to whoever names a lease of them; once, before any load."""

    def mark(self) -> None:
        """What is queued on the device now goes before what is written to blocks; the step thread's."""

    def load(self, load: PeerLoad, ended: Callable[[LoadOutcome], None]) -> None:
        """Begin a load. Args: ended: called once, from any thread."""

    def cancel(self, seq_id: int) -> None:
        """End a load soon. No effect on one that has ended, or that never was."""

    def hold(self, source: KVHandle) -> None:
        """A load will follow: keep the lease for the time in which this is called again, a few seconds."""

    def release(self, source: KVHandle) -> None:
        """No load will follow: give the lease back."""

    def close(self, timeout_s: float) -> None:
        """End all loads and threads; may be called twice."""
