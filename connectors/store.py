"""Where a connector keeps blocks by their content."""

from collections.abc import Sequence
from typing import Protocol

from connectors.save_failure import SaveFailure


class BlockStore(Protocol):
    """Blocks by namespace and hash; used from several threads at a time, each of which may wait for it.

    A namespace says what the bytes of a block mean: `connectors.content.groups.namespace`. All blocks of one have the
    same size. What fails for a reason of the outside world is a miss, or is not kept, with a line in the log: no method
    raises for it.
    """

    def expect(self, namespace: str, block_nbytes: int) -> None:
        """Blocks of this namespace have this size; called before any other method is called with it."""

    def find(self, namespace: str, hashes: Sequence[bytes]) -> int:
        """How many of these blocks are there, counted from the first until one is missing."""

    def load(self, namespace: str, block_hash: bytes, into: memoryview) -> bool:
        """Fill a buffer of the block's size. Returns: False, and anything in it, if that was not possible."""

    def save(self, namespace: str, block_hash: bytes, data: memoryview) -> SaveFailure | None:
        """Keep a block, unless it is there. Returns once others can find it: None, or why it is not kept."""

    def close(self) -> None:
        """Give up what the store holds open; no other call follows."""
