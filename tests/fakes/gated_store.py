"""A store that hangs until the test lets it go on."""

import threading
from collections.abc import Sequence

from connectors.save_failure import SaveFailure

TIMEOUT_S = 30.0


class GatedStore:
    """Blocks in a dictionary, behind gates; implements connectors.store.BlockStore.

    Attributes:
        blocks: what there is. asked, loaded: hashes that `find` and `load` were called with, once they have begun.
        finding, loading, saving: gates, open to begin with.
        breaks: whether what it does raises. keeps: whether it has room.
    """

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, bytes], bytes] = {}
        self.asked: list[tuple[bytes, ...]] = []
        self.loaded: list[bytes] = []
        self.num_closed = 0
        self.breaks = False
        self.keeps = True
        self.finding, self.loading, self.saving = threading.Event(), threading.Event(), threading.Event()
        self.begun = threading.Semaphore(0)
        self.open()

    def open(self) -> None:
        """All gates."""
        for gate in (self.finding, self.loading, self.saving):
            gate.set()

    def _pass(self, gate: threading.Event) -> None:
        self.begun.release()
        assert gate.wait(TIMEOUT_S)
        if self.breaks:
            raise OSError("broken")

    def expect(self, namespace: str, block_nbytes: int) -> None:
        """All sizes are fine."""

    def find(self, namespace: str, hashes: Sequence[bytes]) -> int:
        """Once the gate is open."""
        self.asked.append(tuple(hashes))
        self._pass(self.finding)
        return [*((namespace, block_hash) in self.blocks for block_hash in hashes), False].index(False)

    def load(self, namespace: str, block_hash: bytes, into: memoryview) -> bool:
        """Once the gate is open."""
        self.loaded.append(block_hash)
        self._pass(self.loading)
        data = self.blocks.get((namespace, block_hash))
        if data is not None:
            into[:] = data
        return data is not None

    def save(self, namespace: str, block_hash: bytes, data: memoryview) -> SaveFailure | None:
        """Once the gate is open."""
        self._pass(self.saving)
        if not self.keeps:
            return SaveFailure.FULL
        self.blocks[namespace, block_hash] = bytes(data)
        return None

    def close(self) -> None:
        """Counted."""
        self.num_closed += 1
