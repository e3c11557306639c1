"""Sequences whose KV comes from elsewhere, and blocks that go elsewhere.

A load fills blocks that nobody knows of yet. Once it has ended they are published like any others, so whoever waited
for it finds them as it finds what was computed here.
"""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from connectors.base import BlockLoad, BlockSave, ConnectorScheduler, Finished, KVRequest, TransferPlan
from server.kv.block_pool import BlockPool
from server.kv.prefix_cache import longest_hit
from server.scheduler.outputs import SequenceOutput
from server.scheduler.sequence import Sequence

MAX_SAVING_SHARE = 0.25
"""At most this share of all blocks is kept from being used again because it is being saved."""


@dataclass(slots=True)
class _Transfer:
    """What one sequence is waiting for, from when it is asked for to when it starts.

    Attributes:
        load: once there is one. held: blocks that it has references to.
        is_over: whether nothing is to be waited for any more.
    """

    request: KVRequest
    sequence: Sequence | None
    load: BlockLoad | None = None
    held: tuple[int, ...] = ()
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _Lease:
    """Blocks of a prompt that are held for whoever goes on. Attributes: seq_id: what the connector knows it as."""

    request_id: str
    seq_id: int
    block_ids: tuple[int, ...]


class ExternalKV:
    """The scheduler's view of a connector; owned by the scheduler.

    Attributes:
        num_queried_tokens, num_loaded_tokens: that were looked for elsewhere, and that came. num_failed_loads: that
            brought less than they should. num_unsaved_blocks: that were not offered, as too many were being saved.
    """

    def __init__(self, connector: ConnectorScheduler[object], pool: BlockPool, block_size: int) -> None:
        self._connector = connector
        self._pool = pool
        self._block_size = block_size
        self._next_id = 0
        self._transfers: dict[int, _Transfer] = {}
        self._of_sequence: dict[int, _Transfer] = {}
        self._loading: dict[bytes, int] = {}
        self._saving: Counter[int] = Counter()
        self._offered: list[BlockSave] = []
        self._filled: list[int] = []
        self._leases: dict[str, _Lease] = {}
        self._handing_on: list[tuple[set[int], SequenceOutput]] = []
        self._handed_on: set[str] = set()
        self.num_queried_tokens = 0
        self.num_loaded_tokens = 0
        self.num_failed_loads = 0
        self.num_unsaved_blocks = 0

    @property
    def is_waiting(self) -> bool:
        """Whether something will come that the scheduler must look at."""
        return bool(self._transfers or self._handing_on or self._saving or self._leases)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that no sequence has, and that others read from or write to."""
        held = (
            *(lease.block_ids for lease in self._leases.values()),
            *(transfer.held for transfer in self._transfers.values()),
        )
        return len(self._saving) + sum(map(len, held))

    # -- before a sequence starts ----------------------------------------------------------

    def is_ready(self, sequence: Sequence, *, is_idle: bool) -> bool:
        """Whether a waiting sequence may start: whatever it could get from elsewhere is here, or is not to be had.

        Args: is_idle: nothing runs, so that no block will become free by itself.
        """
        transfer = self._of_sequence.get(sequence.seq_id)
        if transfer is None:
            if sequence.needs_prompt_logprobs:
                return True
            transfer = self._begin(sequence)
        if transfer.is_over or transfer.load is not None:
            return transfer.is_over
        hashes = transfer.request.hashes
        local = longest_hit(self._pool, hashes)
        if len(local) < len(hashes) and hashes[len(local)] in self._loading:
            return False  # another sequence's load brings it
        # Asked even if all is here: who holds it for this sequence may let it go then.
        num_tokens = self._connector.get_num_new_matched_tokens(transfer.request, len(local) * self._block_size)
        if num_tokens is None:
            return False
        num_blocks = min(num_tokens // self._block_size, len(hashes) - len(local))
        if num_blocks == 0:
            transfer.is_over = True
            return True
        num_free = self._pool.num_free - sum(self._pool.is_free(block_id) for block_id in local)
        if num_free >= num_blocks:
            self._load(transfer, local, num_blocks)
        elif is_idle and not self._loading:  # no block will become free
            self._connector.cancel(transfer.request.seq_id)
            transfer.is_over = True
        return transfer.is_over

    def _begin(self, sequence: Sequence) -> _Transfer:
        num_full = (len(sequence.token_ids) - 1) // self._block_size
        continuation = sequence.request.continuation
        request = KVRequest(
            seq_id=self._next_id,
            request_id=sequence.request.request_id,
            num_tokens=len(sequence.token_ids),
            hashes=tuple(sequence.hashes.up_to(sequence.token_ids, num_full)),
            source=None if continuation is None else continuation.source,
            deadline_s=sequence.request.deadline_s,
        )
        self._next_id += 1
        transfer = self._transfers[request.seq_id] = self._of_sequence[sequence.seq_id] = _Transfer(request, sequence)
        self.num_queried_tokens += num_full * self._block_size
        return transfer

    def _load(self, transfer: _Transfer, local: list[int], num_blocks: int) -> None:
        self._pool.acquire(local)
        new_blocks = self._pool.allocate(num_blocks)
        assert new_blocks is not None
        hashes = tuple(transfer.request.hashes[len(local) : len(local) + num_blocks])
        transfer.held = (*local, *new_blocks)
        transfer.load = BlockLoad(
            transfer.request.seq_id, tuple(new_blocks), hashes, len(local), transfer.request.source
        )
        self._loading.update(dict.fromkeys(hashes, transfer.request.seq_id))
        self._filled += new_blocks
        self._connector.update_state_after_alloc(transfer.load)

    def leave(self, sequence: Sequence) -> None:
        """A sequence starts, or ends before it did: what it waited for is not kept for it any longer."""
        transfer = self._of_sequence.pop(sequence.seq_id, None)
        if transfer is None:
            return
        transfer.sequence = None
        if transfer.load is None or transfer.is_over:
            if not transfer.is_over:
                self._connector.cancel(transfer.request.seq_id)
            self._drop(transfer)
        else:
            self._connector.cancel(transfer.request.seq_id)  # its blocks are written to until it is reported

    def _drop(self, transfer: _Transfer) -> None:
        del self._transfers[transfer.request.seq_id]
        self._pool.release(transfer.held)

    # -- blocks that go elsewhere ----------------------------------------------------------

    def offer(self, block_id: int, block_hash: bytes) -> None:
        """A block is full of settled tokens."""
        if not self._connector.wants_saves:
            return
        if len(self._saving) >= MAX_SAVING_SHARE * self._pool.num_usable:
            self.num_unsaved_blocks += 1
            return
        self._pool.acquire([block_id])
        self._saving[block_id] += 1
        self._offered.append(BlockSave(block_id, block_hash))

    def hand_on(self, sequence: Sequence, output: SequenceOutput) -> SequenceOutput | None:
        """A prompt is computed and another node goes on.

        Args: output: the end of the choice. The first one of a request says where the prompt's KV is held.
        Returns: the output; None if it is to come from `settle`, once the blocks are saved.
        """
        if sequence.request.request_id in self._handed_on:
            return output
        self._handed_on.add(sequence.request.request_id)
        num_full = sequence.num_prompt // self._block_size
        block_ids = tuple(sequence.block_ids[:num_full])
        request = KVRequest(
            seq_id=self._next_id,
            request_id=sequence.request.request_id,
            num_tokens=len(sequence.token_ids),
            hashes=tuple(sequence.hashes.up_to(sequence.token_ids, num_full)),
        )
        self._next_id += 1
        handle = self._connector.request_finished(request, block_ids) if block_ids else None
        if handle is None:
            return output
        output = output._replace(source=handle)
        if handle.lease_id:
            self._pool.acquire(block_ids)
            self._leases[handle.lease_id] = _Lease(sequence.request.request_id, request.seq_id, block_ids)
            return output
        unsaved = {block_id for block_id in block_ids if block_id in self._saving}
        if not unsaved:
            return output
        self._handing_on.append((unsaved, output))
        return None

    def release(self, request_id: str) -> None:
        """Nobody goes on with a request: what is held for it is no longer of use."""
        for lease in self._leases.values():
            if lease.request_id == request_id:
                self._connector.cancel(lease.seq_id)

    def forget(self, request_id: str) -> None:
        """All choices of a request have ended here."""
        self._handed_on.discard(request_id)

    # -- what the other half has done ------------------------------------------------------

    def plan(self) -> TransferPlan | None:
        """What the worker half is to do next; None for nothing."""
        if self._offered:
            self._connector.save(self._offered)
            self._offered = []
        filled, self._filled = tuple(self._filled), []
        metadata = self._connector.build_connector_meta()
        return None if metadata is None else TransferPlan(metadata, filled)

    def settle(
        self, finished: Finished, bad_blocks: frozenset[int]
    ) -> tuple[SequenceOf[SequenceOutput], SequenceOf[Sequence]]:
        """Take in what has ended.

        Returns: outputs that waited for their blocks to be saved, and waiting sequences whose load has failed.
        """
        failed = [sequence for seq_id in finished.loaded if (sequence := self._settle_load(seq_id, bad_blocks))]
        for block_id in finished.saved:
            self._saving[block_id] -= 1
            if not self._saving[block_id]:
                del self._saving[block_id]
            self._pool.release([block_id])
        for lease_id in finished.released:
            lease = self._leases.pop(lease_id, None)
            self._pool.release(() if lease is None else lease.block_ids)
        outputs = []
        for entry in list(self._handing_on):
            unsaved, output = entry
            unsaved -= set(finished.saved) - self._saving.keys()
            if not unsaved:
                self._handing_on.remove(entry)
                outputs.append(output)
        return outputs, failed

    def _settle_load(self, seq_id: int, bad_blocks: frozenset[int]) -> Sequence | None:
        """Publish what a load has brought. Returns: its sequence, if that was to get more and still waits."""
        transfer = self._transfers[seq_id]
        load = transfer.load
        assert load is not None
        num_good = next((i for i, block_id in enumerate(load.block_ids) if block_id in bad_blocks), len(load.block_ids))
        for block_hash in load.hashes:
            self._loading.pop(block_hash, None)
        for block_id, block_hash in zip(load.block_ids[:num_good], load.hashes, strict=False):
            self._pool.publish(block_id, block_hash)
        self.num_loaded_tokens += num_good * self._block_size
        bad = load.block_ids[num_good:]
        self._pool.release(bad)
        transfer.held = transfer.held[: len(transfer.held) - len(bad)]
        transfer.is_over = True
        if transfer.sequence is None:
            self._drop(transfer)
            return None
        if not bad:
            return None
        self.num_failed_loads += 1
        return transfer.sequence
