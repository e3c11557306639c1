"""A node with KV blocks and a connector to other nodes, without an engine."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from unittest.mock import patch

import torch
from torch import Tensor

from connectors.base import BlockLoad, ConnectorContext, KVCaches, KVGroup, KVRequest
from connectors.peer.leases import LeaseTable
from connectors.registry import config_class
from server.kv_handle import KVHandle

LAYERS, HEADS, WIDTH = 2, 3, 8
FINGERPRINT = "a1b2"


def chain_of(text: str, count: int) -> tuple[bytes, ...]:
    """Hashes of the blocks of a prompt."""
    return tuple(sha256(f"{text} {i}".encode()).digest() for i in range(count))


@dataclass(frozen=True)
class Ended:
    """How loads and leases of a node have ended so far."""

    bad: dict[int, frozenset[int]] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)
    released: list[str] = field(default_factory=list)


class KVNode:
    """Both halves of a connector, driven as a scheduler does.

    Attributes:
        sequences: that were handed on, by their leases.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        block_size: int = 4,
        width: int = WIDTH,
        engine_id: str = "engine-a",
        fingerprint: str = FINGERPRINT,
        draft: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_producer: bool = True,
        connector: str = "tcp",
        device: str = "cpu",
        **settings: object,
    ) -> None:
        """Args: draft: fingerprint of a second group. device: of the blocks. settings: of the connector."""
        self.block_size = block_size
        self.blocks = torch.zeros(num_blocks, LAYERS, HEADS, block_size, width, device=device)
        groups = [KVGroup("target", fingerprint, self.blocks)]
        self.drafts = torch.zeros(num_blocks, 5, device=device)
        self.whole_drafts: set[int] = set(range(num_blocks))
        if draft is not None:
            groups.append(KVGroup("draft", draft, self.drafts, self.whole_drafts.__contains__))
        self.notified = threading.Semaphore(0)
        context = ConnectorContext(
            name=connector,
            engine_id=engine_id,
            block_size=block_size,
            fingerprint=fingerprint,
            notify=self.notified.release,
            clock=clock,
            is_producer=is_producer,
        )
        both = config_class(connector).model_validate(settings).build(context)
        self.scheduler, self.worker = both.scheduler, both.worker
        self.worker.register_kv_caches(KVCaches(tuple(groups), block_size))
        self.ended = Ended()
        self.sequences: dict[str, int] = {}
        self._next_id = 0
        self._loads: dict[int, tuple[int, ...]] = {}

    def fill(self, seed: int = 0) -> Tensor:
        """Random content. Returns: the target's blocks."""
        generator = torch.Generator().manual_seed(seed)
        self.blocks.copy_(torch.randn(self.blocks.shape, generator=generator))
        self.drafts.copy_(torch.randn(self.drafts.shape, generator=generator))
        return self.blocks

    def request(
        self, num_blocks: int, *, text: str = "a", source: KVHandle | None = None, deadline_s: float | None = None
    ) -> KVRequest:
        """A prompt of so many full blocks and one more token."""
        self._next_id += 1
        hashes = chain_of(text, num_blocks)
        return KVRequest(
            self._next_id,
            f"r{self._next_id}",
            num_blocks * self.block_size + 1,
            hashes,
            source,
            deadline_s,
            lambda _: chain_of(text, 64),
        )

    def hand_on(self, *block_ids: int, text: str = "a") -> KVHandle:
        """Hold these blocks of a prompt for another node."""
        request = self.request(len(block_ids), text=text)
        handle = self.scheduler.request_finished(request, block_ids)
        assert handle is not None
        self.sequences[handle.lease_id] = request.seq_id
        return handle

    def matched(self, request: KVRequest, num_computed_blocks: int = 0) -> int:
        """Blocks that can be loaded."""
        num_tokens = self.scheduler.get_num_new_matched_tokens(request, num_computed_blocks * self.block_size)
        assert num_tokens is not None
        assert num_tokens % self.block_size == 0
        return num_tokens // self.block_size

    def order(self, request: KVRequest, block_ids: tuple[int, ...], first_block: int = 0) -> int:
        """Begin to load blocks for a request that was found a match for. Returns: its number."""
        hashes = tuple(request.hashes[first_block : first_block + len(block_ids)])
        load = BlockLoad(request.seq_id, block_ids, hashes, first_block, request.source)
        self._loads[request.seq_id] = block_ids
        self.scheduler.update_state_after_alloc(load)
        self.step()
        return request.seq_id

    def begin(self, handle: KVHandle, *block_ids: int, text: str = "a", deadline_s: float | None = None) -> int:
        """Load a prompt's first blocks from where the handle says. Returns: the load's number."""
        request = self.request(len(block_ids), text=text, source=handle, deadline_s=deadline_s)
        assert self.matched(request) == len(block_ids)
        return self.order(request, block_ids)

    def step(self) -> None:
        """What happens between two steps."""
        metadata = self.scheduler.build_connector_meta()
        if metadata is not None:
            self.worker.start_load_kv(metadata)
        finished = self.worker.get_finished()
        errors = self.worker.get_block_ids_with_load_errors()
        for seq_id in finished.loaded:
            assert seq_id not in self.ended.bad, "a load ended twice"
            self.ended.bad[seq_id] = errors & set(self._loads[seq_id])
        self.ended.complete.update(finished.complete)
        self.ended.released.extend(finished.released)

    def wait_for(self, condition: Callable[[Ended], bool], timeout_s: float = 30.0) -> None:
        """Step whenever something has finished, until the condition holds. Raises: TimeoutError."""
        until_s = time.monotonic() + timeout_s
        self.step()
        while not condition(self.ended):
            if not self.notified.acquire(timeout=max(0.0, until_s - time.monotonic())):
                raise TimeoutError(f"it did not happen in {timeout_s} s; {self.ended}")
            self.step()

    def wait_for_load(self, seq_id: int) -> frozenset[int]:
        """Returns: its bad blocks."""
        self.wait_for(lambda ended: seq_id in ended.bad)
        return self.ended.bad[seq_id]

    def wait_for_release(self, handle: KVHandle) -> None:
        """Wait until nobody reads from a lease."""
        self.wait_for(lambda ended: handle.lease_id in ended.released)
        assert self.ended.released.count(handle.lease_id) == 1

    def close(self) -> None:
        """End all threads."""
        self.worker.shutdown(10.0)


def ask_until_renewed(reader: KVNode, request: KVRequest) -> None:
    """Ask for what there is of a request until the node that holds it has heard of it."""
    with patch.object(LeaseTable, "renew", autospec=True, side_effect=LeaseTable.renew) as renew:
        while not renew.called:
            assert reader.matched(request)
            reader.step()
            reader.notified.acquire(timeout=0.02)
