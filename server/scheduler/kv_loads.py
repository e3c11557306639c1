"""Waiting sequences whose KV comes from elsewhere.

A load fills blocks that nobody knows of yet. Once it has ended they are published like any others, so whoever waited
for it finds them as it finds what was computed here.
"""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from connectors.base import BlockLoad, ConnectorScheduler, KVRequest
from server.kv.block_pool import BlockPool
from server.kv.prefix_cache import longest_hit
from server.scheduler.held_blocks import HeldBlocks
from server.scheduler.sequence import Sequence
from server.scheduler.statistics import Counters

RENEWAL_S = 1.0
"""Whoever holds KV for a sequence that is far from its turn is told so often that it is still wanted."""


class Readiness(enum.Enum):
    """Whether a waiting sequence may start, as far as a connector is concerned.

    READY: what it could get from elsewhere is here, or is not to be had. LOADING: not yet; others may start before it.
    SHORT: it could get something and has no blocks for it; others that start before it might keep them from it for
    ever.
    """

    READY = enum.auto()
    LOADING = enum.auto()
    SHORT = enum.auto()


@dataclass(eq=False, slots=True)
class _Wish:
    """What a waiting sequence may get.

    Attributes:
        held: blocks that are kept for it until it starts. load: while there is one.
        num_found: its first blocks that could be had, here or elsewhere, when it was asked for last.
        is_over: whether it will get no more.
    """

    request: KVRequest
    sequence: Sequence
    held: tuple[int, ...] = ()
    load: "_Load | None" = None
    num_found: int = 0
    is_over: bool = False


@dataclass(eq=False, slots=True)
class _Load:
    """Blocks that are being written to, held until that has ended. Attributes: wish: None if nobody waits for it."""

    order: BlockLoad
    wish: _Wish | None
    began_s: float


class KVLoads:
    """Asks a connector for what waiting sequences lack, and has it loaded; owned by the scheduler."""

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
        self._wishes: dict[int, _Wish] = {}
        self._loads: dict[int, _Load] = {}
        self._coming: dict[bytes, int] = {}
        self._filled: list[int] = []
        self._renewal_s = -RENEWAL_S

    def readiness(self, sequence: Sequence, num_reserved: int) -> Readiness:
        """Whether a waiting sequence may start; if something can be had for it, it is ordered.

        Args: num_reserved: free blocks that a load has to leave.
        """
        wish = self._wishes.get(sequence.seq_id)
        if wish is None:
            if sequence.needs_prompt_logprobs or not self._connector.wants_loads:
                return Readiness.READY
            wish = self._begin(sequence)
        if wish.is_over or wish.load is not None:
            return Readiness.READY if wish.is_over else Readiness.LOADING
        hashes = wish.request.hashes
        local = longest_hit(self._pool, hashes)
        if len(local) < len(hashes) and hashes[len(local)] in self._coming:
            return Readiness.LOADING
        if wish.num_found - len(local) + num_reserved > self._pool.num_free + len(self._held):
            return Readiness.SHORT  # a store is not to be asked with every step for what there is no room for
        # Asked even if all is here: who holds it for this sequence may let it go then.
        num_tokens = self._connector.get_num_new_matched_tokens(wish.request, len(local) * self._block_size)
        if num_tokens is None:
            return Readiness.LOADING
        num_blocks = min(num_tokens // self._block_size, len(hashes) - len(local))
        if num_blocks > 0 and not self._load(wish, local, num_blocks, num_reserved):
            return Readiness.SHORT
        self._counters.external_queried_tokens += (len(hashes) - len(local)) * self._block_size
        wish.is_over = wish.load is None
        return Readiness.READY if wish.is_over else Readiness.LOADING

    def _begin(self, sequence: Sequence) -> _Wish:
        num_tokens = len(sequence.token_ids)
        num_full = (num_tokens - 1) // self._block_size

        def hash_blocks(block_size: int) -> list[bytes]:
            return sequence.hashes.of_size(block_size).up_to(sequence.token_ids, num_tokens // block_size)

        request = KVRequest(
            seq_id=self._make_id(),
            request_id=sequence.request.request_id,
            num_tokens=num_tokens,
            hashes=tuple(sequence.hashes.up_to(sequence.token_ids, num_full)),
            source=sequence.source,
            deadline_s=sequence.request.deadline_s,
            hash_blocks=hash_blocks,
        )
        wish = self._wishes[sequence.seq_id] = _Wish(request, sequence)
        return wish

    def _load(self, wish: _Wish, local: list[int], num_blocks: int, num_reserved: int) -> bool:
        """Order a load behind the blocks that are here. Returns: False if there are not enough free blocks for it."""
        self._held.acquire(local)
        wish.num_found = len(local) + num_blocks
        if not self.give_way(num_blocks + num_reserved, wish.sequence):
            self._held.release(local)
            return False
        wish.held = tuple(local)
        hashes = tuple(wish.request.hashes[len(local) : len(local) + num_blocks])
        request = wish.request
        order = BlockLoad(
            request.seq_id, tuple(self._held.allocate(num_blocks)), hashes, len(local), source=request.source
        )
        wish.load = self._loads[order.seq_id] = _Load(order, wish, self._clock())
        self._coming.update(dict.fromkeys(hashes, order.seq_id))
        self._filled += order.block_ids
        self._connector.update_state_after_alloc(order)
        return True

    def give_way(self, num_free: int, to: Sequence | None = None) -> bool:
        """Have so many blocks free, if need be at the cost of sequences that wait with what was loaded for them.

        They stay in the cache until they are used for something else; what is lost of them is computed.

        Args: to: only sequences that go after it give way; all, if None.
        Returns: whether there are as many.
        """
        if self._pool.num_free < num_free:
            wishes = [wish for wish in self._wishes.values() if wish.held and wish.load is None]
            for wish in sorted(wishes, key=lambda wish: wish.sequence.order, reverse=True):
                if self._pool.num_free >= num_free or (to is not None and wish.sequence.order <= to.order):
                    break
                self._held.release(wish.held)
                wish.held = ()
        return self._pool.num_free >= num_free

    def renew(self, waiting: Iterable[Sequence], now: float) -> None:
        """Ask again for what is leased to those that are not asked for yet; to be called with every step."""
        if now < self._renewal_s:
            return
        self._renewal_s = now + RENEWAL_S
        for sequence in waiting:
            if sequence.source is None or not sequence.source.lease_id or not self._connector.wants_loads:
                continue
            wish = self._wishes.get(sequence.seq_id) or self._begin(sequence)
            if not wish.is_over and wish.load is None:
                num_computed = len(longest_hit(self._pool, wish.request.hashes)) * self._block_size
                self._connector.get_num_new_matched_tokens(wish.request, num_computed)

    def leave(self, sequence: Sequence) -> None:
        """A sequence starts, or ends before it did: nothing is kept for it any longer."""
        wish = self._wishes.pop(sequence.seq_id, None)
        if wish is None:
            return
        if not wish.is_over:
            self._abandon(wish)
        self._held.release(wish.held)

    def _abandon(self, wish: _Wish) -> None:
        """Nobody waits for it any more; blocks that are being written to are held until that was reported."""
        self._connector.cancel(wish.request.seq_id)
        wish.is_over = True
        if wish.load is not None:
            self._forget_hashes(wish.load.order)
            wish.load.wish = None
            wish.load = None

    def _forget_hashes(self, order: BlockLoad) -> None:
        for block_hash in order.hashes:
            if self._coming.get(block_hash) == order.seq_id:
                del self._coming[block_hash]

    def take_filled(self) -> tuple[int, ...]:
        """The blocks of all loads that were ordered since the last call."""
        filled, self._filled = tuple(self._filled), []
        return filled

    def settle(self, seq_id: int, bad_blocks: frozenset[int]) -> Sequence | None:
        """Publish what a load has brought. Returns: the sequence, if that waits and was to get more."""
        load = self._loads.pop(seq_id)
        order, wish = load.order, load.wish
        self._forget_hashes(order)
        num_good = next(
            (i for i, block_id in enumerate(order.block_ids) if block_id in bad_blocks), len(order.block_ids)
        )
        self._counters.external_loaded_tokens += num_good * self._block_size
        kept: list[int] = []
        for block_id, block_hash in zip(order.block_ids[:num_good], order.hashes, strict=False):
            self._pool.publish(block_id, block_hash)
            there = self._pool.lookup(block_hash)  # another one, if that was computed meanwhile
            assert there is not None
            kept.append(there)
        if wish is not None:
            self._held.acquire(kept)
            wish.held += tuple(kept)
            wish.load, wish.is_over = None, True
            wish.sequence.transfer_s += self._clock() - load.began_s
        self._held.release(order.block_ids)
        if wish is None or num_good == len(order.block_ids):
            return None
        self._counters.num_failed_loads += 1
        return wish.sequence

    def end_overdue(self, now: float) -> list[Sequence]:
        """Give up loads that take too long. Returns: the sequences that waited for them."""
        began_by_s = now - self._connector.load_timeout_s
        overdue = [load.wish for load in self._loads.values() if load.wish is not None and load.began_s <= began_by_s]
        for wish in overdue:
            self._abandon(wish)
            wish.sequence.transfer_s += self._connector.load_timeout_s
        self._counters.num_failed_loads += len(overdue)
        return [wish.sequence for wish in overdue]
