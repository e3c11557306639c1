"""Blocks that go elsewhere: into a store, or to the node that goes on with a request."""

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count

from connectors.base import BlockSave, ConnectorScheduler, KVRequest
from connectors.save_failure import SaveFailure
from server.kv.block_pool import BlockPool
from server.scheduler.held_blocks import HeldBlocks
from server.scheduler.outputs import SequenceOutput
from server.scheduler.sequence import InFlight, Sequence
from server.scheduler.statistics import Counters

logger = logging.getLogger(__name__)

MAX_SAVING_SHARE = 0.25
"""At most this share of all blocks is kept from being used again because it is being saved."""
HAND_ON_TIMEOUT_S = 5.0
"""The end of a choice waits no longer for its prompt's blocks to be saved."""


@dataclass(frozen=True, slots=True)
class _Lease:
    """Blocks of a prompt that are held for whoever goes on. Attributes: seq_id: what the connector knows it as."""

    request_id: str
    seq_id: int
    block_ids: tuple[int, ...]


@dataclass(eq=False, slots=True)
class _HandingOn:
    """The end of a choice, which waits for blocks to be saved, at most until then."""

    output: SequenceOutput
    blocks: Mapping[int, bytes]
    until_s: float


class KVSaves:
    """Offers full blocks to a connector and holds what it reads from; owned by the scheduler.

    Blocks beyond MAX_SAVING_SHARE wait for their turn without being held: they may be used for something else before
    it comes.
    """

    def __init__(
        self,
        connector: ConnectorScheduler[object],
        pool: BlockPool,
        held: HeldBlocks,
        block_size: int,
        clock: Callable[[], float],
        next_id: Callable[[], int],
        counters: Counters,
    ) -> None:
        """Args: next_id: names sequences towards the connector."""
        self._connector = connector
        self._pool = pool
        self._held = held
        self._block_size = block_size
        self._clock = clock
        self._make_id = next_id
        self._counters = counters
        self._max_saving = max(1, int(MAX_SAVING_SHARE * pool.num_usable))
        self._saving: dict[int, bytes] = {}
        self._queued: dict[int, bytes] = {}
        self._ordered: list[BlockSave] = []
        self._is_announcing = connector.wants_announcements
        self._next_announcement = count().__next__
        self._filling: dict[int, BlockSave] = {}
        self._announced: list[BlockSave] = []
        self._leases: dict[str, _Lease] = {}
        self._handed_on: set[str] = set()
        self._handing_on: list[_HandingOn] = []

    @property
    def is_handing_on(self) -> bool:
        """Whether choices wait for their blocks to be saved."""
        return bool(self._handing_on)

    def launch(self, sequence: Sequence, row: InFlight, end: int) -> None:
        """A row is to be launched that computes up to position `end`: announce what it fills with known tokens.

        Only rows write to blocks that are offered, so what was announced of one last tells how it was filled.
        """
        if not self._is_announcing:
            return
        num_filled = min(end - row.num_drafts, len(sequence.token_ids)) // self._block_size
        if row.is_sampling and row.num_query == 1 + row.num_drafts:
            num_filled = 0  # it decodes
        hashes = sequence.hashes.up_to(sequence.token_ids, num_filled)
        for place in range(sequence.computed_upper // self._block_size, -(-end // self._block_size)):
            block_id = sequence.block_ids[place]
            self._filling.pop(block_id, None)
            if place < num_filled and self._pool.lookup(hashes[place]) is None:
                self._filling[block_id] = BlockSave(block_id, hashes[place], self._next_announcement())
                self._announced.append(self._filling[block_id])

    def offer(self, block_id: int, block_hash: bytes) -> None:
        """A block is full of settled tokens and published; of equal ones the first is enough."""
        if not self._connector.wants_saves or self._pool.lookup(block_hash) != block_id:
            return
        if block_id in self._queued:
            self._counters.num_unsaved_blocks += 1  # what it held before is gone
        self._queued[block_id] = block_hash
        self._order()

    def _order(self) -> None:
        while self._queued and len(self._saving) < self._max_saving:
            block_id, block_hash = next(iter(self._queued.items()))
            del self._queued[block_id]
            if self._pool.lookup(block_hash) != block_id:
                self._counters.num_unsaved_blocks += 1
                continue
            self._held.acquire([block_id])
            self._saving[block_id] = block_hash
            announced = self._filling.pop(block_id, None)
            save = BlockSave(block_id, block_hash)
            if announced is not None and announced.block_hash == block_hash:
                save = announced
            self._ordered.append(save)

    def tell(self) -> None:
        """Offer the connector what is held for it, and announce what the next step fills."""
        if self._announced:
            self._connector.announce(self._announced)
            self._announced = []
        if self._ordered:
            self._connector.save(self._ordered)
            self._ordered = []

    def hand_on(self, sequence: Sequence, output: SequenceOutput) -> SequenceOutput | None:
        """A prompt is computed and another node goes on.

        Args: output: the end of the choice. The first one of a request says where the prompt's KV is held.
        Returns: the output; None if it is to come from `saved` or `end_overdue`, once the blocks are saved.
        """
        if sequence.request.request_id in self._handed_on:
            return output
        num_full = sequence.num_prompt // self._block_size
        block_ids = tuple(sequence.block_ids[:num_full])
        request = KVRequest(
            seq_id=self._make_id(),
            request_id=sequence.request.request_id,
            num_tokens=len(sequence.token_ids),
            hashes=tuple(sequence.hashes.up_to(sequence.token_ids, num_full)),
        )
        self._handed_on.add(request.request_id)
        handle = self._connector.request_finished(request, block_ids) if block_ids else None
        if handle is None:
            return output
        output = output._replace(source=handle)
        if handle.lease_id:
            self._held.acquire(block_ids)
            self._leases[handle.lease_id] = _Lease(request.request_id, request.seq_id, block_ids)
            return output
        there = {block_hash: self._pool.lookup(block_hash) for block_hash in request.hashes}
        blocks = {block_id: block_hash for block_hash, block_id in there.items() if block_id is not None}
        until_s = self._clock() + HAND_ON_TIMEOUT_S
        if sequence.request.deadline_s is not None:
            until_s = min(until_s, sequence.request.deadline_s)
        waiting = _HandingOn(output, blocks, until_s)
        if not self._is_unsaved(waiting):
            return output
        self._handing_on.append(waiting)
        return None

    def _is_unsaved(self, waiting: _HandingOn) -> bool:
        return any(
            block_hash in (self._saving.get(block_id), self._queued.get(block_id))
            for block_id, block_hash in waiting.blocks.items()
        )

    def forget(self, request_id: str) -> None:
        """All choices of a request have ended here."""
        self._handed_on.discard(request_id)

    def abort(self, request_id: str, choice: int | None) -> None:
        """Nobody waits for a choice any more, or, if None, for any of a request."""
        self._handing_on = [
            waiting
            for waiting in self._handing_on
            if waiting.output.request_id != request_id or choice not in (None, waiting.output.choice)
        ]

    def release(self, request_id: str) -> None:
        """Nobody goes on with a request: what is held for it is no longer of use."""
        for lease in self._leases.values():
            if lease.request_id == request_id:
                self._connector.cancel(lease.seq_id)

    def saved(self, block_ids: SequenceOf[int]) -> list[SequenceOutput]:
        """Saves have ended, well or not. Returns: ends of choices that waited for them."""
        for block_id in block_ids:
            del self._saving[block_id]
        self._held.release(block_ids)
        self._order()
        return self._take([waiting for waiting in self._handing_on if not self._is_unsaved(waiting)])

    def end(self, block_ids: SequenceOf[int]) -> None:
        """Nothing is saved any more. Args: block_ids: whose saves have ended since `saved` was called last."""
        for block_id in block_ids:
            del self._saving[block_id]
        left = {**self._saving, **self._queued}
        num_lost = sum(self._pool.lookup(block_hash) == block_id for block_id, block_hash in left.items())
        if num_lost:
            self._counters.save_failures[SaveFailure.STOPPED] += num_lost
            logger.warning("%d KV blocks are lost that were to be saved: the engine has stopped", num_lost)

    def end_overdue(self, now: float) -> list[SequenceOutput]:
        """Ends of choices that have waited for too long: whoever goes on computes what it does not find."""
        return self._take([waiting for waiting in self._handing_on if waiting.until_s <= now])

    def _take(self, over: list[_HandingOn]) -> list[SequenceOutput]:
        if over:
            self._handing_on = [waiting for waiting in self._handing_on if waiting not in over]
        return [waiting.output for waiting in over]

    def released(self, lease_ids: SequenceOf[str]) -> None:
        """Nobody reads from these leases any more."""
        for lease_id in lease_ids:
            lease = self._leases.pop(lease_id, None)
            self._held.release(() if lease is None else lease.block_ids)
