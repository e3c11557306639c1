"""A connector with a few blocks of random bytes, driven as an engine drives it, without one."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from connectors.base import BlockLoad, BlockSave, Connector, ConnectorContext, Finished, KVCaches, KVGroup, KVRequest
from connectors.choice import read_choice
from server.kv_handle import KVHandle
from tests.fakes.device import DEVICE

BLOCK_SIZE = 16
NUM_BLOCKS = 12
TIMEOUT_S = 30.0
FINGERPRINT = "5eed" * 16


class ConnectorUnderTest:
    """One node: its connector, its blocks, and what was reported to it.

    Attributes:
        target, draft: the blocks of two groups, random bytes; the second is smaller and of another type.
    """

    def __init__(self, connector: Connector, something_finished: threading.Event, fingerprint: str) -> None:
        self.connector = connector
        self.target = torch.randint(0, 256, (NUM_BLOCKS, 2, 2, BLOCK_SIZE, 8), dtype=torch.uint8, device=DEVICE)
        self.draft = torch.randint(-9, 9, (NUM_BLOCKS, 24), dtype=torch.int16, device=DEVICE)
        self.loaded: list[int] = []
        self.complete: list[int] = []
        self.saved: list[int] = []
        self.released: list[str] = []
        self.bad: set[int] = set()
        self._something_finished = something_finished
        self._next_seq_id = self._next_announcement = 0
        groups = (KVGroup("target", fingerprint, self.target), KVGroup("draft", f"{fingerprint}d", self.draft))
        connector.worker.register_kv_caches(KVCaches(groups, BLOCK_SIZE))

    def step(self, *, fails_at: int | None = None) -> None:
        """What an engine does between two steps, and in one that computes a prompt. Args: fails_at: this layer."""
        metadata = self.connector.scheduler.build_connector_meta()
        if metadata is not None:
            self.connector.worker.start_load_kv(metadata)
        if self.connector.worker.is_layerwise:
            for layer in range(self.target.shape[1]):
                self.connector.worker.wait_for_layer_load(layer)
                if layer == fails_at:
                    break
                self.connector.worker.save_kv_layer(layer)
        self.connector.worker.wait_for_save()
        self._take(self.connector.worker.get_finished())

    def _take(self, finished: Finished) -> None:
        self.loaded += finished.loaded
        self.complete += finished.complete
        self.saved += finished.saved
        self.released += finished.released
        self.bad |= self.connector.worker.get_block_ids_with_load_errors()

    def steps_until(self, is_so: Any) -> None:
        """Step whenever the connector says that something has finished."""
        until_s = time.monotonic() + TIMEOUT_S
        while not is_so():
            assert time.monotonic() < until_s, "the connector has not finished"
            self._something_finished.wait(0.05)
            self._something_finished.clear()
            self.step()

    def save(self, block_ids: list[int], hashes: list[bytes]) -> bool:
        """Offer full blocks, and wait until nobody reads from them. Returns: whether the connector wants any.

        If it wants to be told before that a step fills them, it is.
        """
        if not self.connector.scheduler.wants_saves:
            return False
        saves = [BlockSave(*each) for each in zip(block_ids, hashes, strict=True)]
        if self.connector.scheduler.wants_announcements:
            saves = self.announce(block_ids, hashes)
            self.step()
        num_before = len(self.saved)
        self.connector.scheduler.save(saves)
        self.step()
        self.steps_until(lambda: len(self.saved) == num_before + len(block_ids))
        assert sorted(self.saved[num_before:]) == sorted(block_ids)
        return True

    def announce(self, block_ids: list[int], hashes: list[bytes]) -> list[BlockSave]:
        """The next step fills these blocks. Returns: as what they are to be offered."""
        first, self._next_announcement = self._next_announcement, self._next_announcement + len(block_ids)
        saves = [
            BlockSave(*each) for each in zip(block_ids, hashes, range(first, self._next_announcement), strict=True)
        ]
        self.connector.scheduler.announce(saves)
        return saves

    def request(self, hashes: list[bytes], source: KVHandle | None = None) -> KVRequest:
        """A sequence with these full blocks and one token more."""
        self._next_seq_id += 1
        return KVRequest(
            seq_id=self._next_seq_id,
            request_id=f"request-{self._next_seq_id}",
            num_tokens=len(hashes) * BLOCK_SIZE + 1,
            hashes=hashes,
            source=source,
        )

    def match(self, request: KVRequest, num_computed_blocks: int = 0) -> int:
        """Ask until there is an answer. Returns: blocks."""
        answers: list[int | None] = []

        def is_answered() -> bool:
            answers.append(
                self.connector.scheduler.get_num_new_matched_tokens(request, num_computed_blocks * BLOCK_SIZE)
            )
            return answers[-1] is not None

        if not is_answered():
            self.steps_until(is_answered)
        count = answers[-1]
        assert count is not None
        assert count % BLOCK_SIZE == 0
        return count // BLOCK_SIZE

    def load(self, request: KVRequest, block_ids: list[int], first_block: int = 0) -> None:
        """Order a load, in the same breath as its match."""
        hashes = tuple(request.hashes[first_block : first_block + len(block_ids)])
        self.connector.scheduler.update_state_after_alloc(
            BlockLoad(request.seq_id, tuple(block_ids), hashes, first_block, request.source)
        )
        self.step()

    def wait_loaded(self, request: KVRequest) -> None:
        """Until its load is reported."""
        self.steps_until(lambda: request.seq_id in self.loaded)

    def content(self, block_ids: list[int]) -> tuple[Tensor, Tensor]:
        """A copy of these blocks."""
        return self.target[block_ids].clone(), self.draft[block_ids].clone()


@contextmanager
def connector_under_test(
    choice: Mapping[str, Any], fingerprint: str = FINGERPRINT, kv_description: str = ""
) -> Iterator[ConnectorUnderTest]:
    """A node with this connector, by what `kv_transfer_config` says of it."""
    something_finished = threading.Event()
    chosen = read_choice(choice, "kv_transfer_config.")
    connector = chosen.settings.build(
        ConnectorContext(
            name=chosen.name,
            engine_id=uuid4().hex,
            block_size=BLOCK_SIZE,
            fingerprint=fingerprint,
            notify=something_finished.set,
            clock=time.monotonic,
            is_producer=chosen.is_producer,
            is_consumer=chosen.is_consumer,
            kv_description=kv_description,
        )
    )
    try:
        yield ConnectorUnderTest(connector, something_finished, fingerprint)
    finally:
        connector.worker.shutdown(TIMEOUT_S)
