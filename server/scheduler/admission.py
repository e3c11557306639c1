"""Who of the waiting sequences starts."""

from collections.abc import Iterator
from itertools import islice

from server.config import SchedulerConfig
from server.kv.block_pool import BlockPool
from server.kv.prefix_cache import longest_hit
from server.plan import SequenceStart
from server.scheduler.batch import RunningBatch
from server.scheduler.budget import TokenBudget
from server.scheduler.external_kv import ExternalKV
from server.scheduler.kv_loads import Readiness
from server.scheduler.sequence import InFlight, Sequence
from server.scheduler.statistics import Counters
from server.scheduler.waiting import WaitingQueue

NUM_AHEAD = 4
"""Sequences for which KV is loaded while no seat is free."""


class Admission:
    """Seats waiting sequences, in order, while seats, blocks and budget last; owned by the scheduler."""

    def __init__(
        self,
        config: SchedulerConfig,
        block_size: int,
        pool: BlockPool,
        waiting: WaitingQueue,
        batch: RunningBatch,
        counters: Counters,
        *,
        num_reserved: int = 0,
        external: ExternalKV | None = None,
    ) -> None:
        """Args: num_reserved: positions behind the known tokens that have a block, too."""
        self._external = external
        self._num_reserved = num_reserved
        self._block_size = block_size
        self._pool = pool
        self._watermark = int(config.watermark * pool.num_usable)
        self._waiting = waiting
        self._batch = batch
        self._counters = counters

    def admit(
        self, budget: TokenBudget, now: float, *, is_held: bool
    ) -> Iterator[tuple[Sequence, SequenceStart, InFlight]]:
        """Start sequences and offer each a row, which the caller takes before the next.

        One whose next block is being computed for another waits for it.

        Args: is_held: only sequences that ran before may start.
        """
        if not self._batch.has_free_slot:
            if self._external is not None and not is_held:
                self._load_ahead()
            return
        size = self._block_size
        computing = {name for running in self._batch.sequences for name in running.unpublished_hashes(size)}
        for sequence in self._waiting:
            if not sequence.is_ready() or (is_held and sequence.scheduled_s is None):
                continue
            if not self._batch.has_free_slot:
                break
            readiness = self.readiness(sequence)
            if readiness is Readiness.LOADING:
                continue
            if readiness is Readiness.SHORT:
                break
            hashes = sequence.hashes_to_find(size)
            cached_blocks = longest_hit(self._pool, hashes)
            if len(cached_blocks) < len(hashes) and hashes[len(cached_blocks)] in computing:
                continue
            num_cached = len(cached_blocks) * self._block_size
            wanted = budget.offer_prompt(len(sequence.token_ids) - num_cached)
            if wanted is None or not self._seat(sequence, cached_blocks):
                break
            if self._external is not None:
                self._external.loads.leave(sequence)
            sequence.restart(num_cached)
            self._waiting.remove(sequence)
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now
                self._count_first_start(sequence)
            computing.update(hashes[len(cached_blocks) :])
            yield sequence, _start_of(sequence), wanted

    def _load_ahead(self) -> None:
        """Have KV for the next ones loaded, so that a seat is not empty for that long once one is free."""
        for sequence in islice((waiting for waiting in self._waiting if waiting.is_ready()), NUM_AHEAD):
            if self.readiness(sequence) is Readiness.SHORT:
                return

    def readiness(self, sequence: Sequence) -> Readiness:
        """Whether KV from elsewhere is here; orders what can be had."""
        return Readiness.READY if self._external is None else self._external.loads.readiness(sequence, self._reserve)

    @property
    def _reserve(self) -> int:
        """Blocks that stay free for sequences that run."""
        return self._watermark if len(self._batch) else 0

    def _seat(self, sequence: Sequence, cached_blocks: list[int]) -> bool:
        """Give it a slot and blocks if all its known tokens fit above the watermark. Returns: whether they do."""
        end = min(len(sequence.token_ids) + self._num_reserved, sequence.limit)
        num_new = -(-end // self._block_size) - len(cached_blocks)
        self._pool.acquire(cached_blocks)
        if not self._has_free(num_new + self._reserve, sequence):
            self._pool.release(cached_blocks)
            return False
        new_blocks = self._pool.allocate(num_new)
        assert new_blocks is not None
        self._batch.add(sequence, cached_blocks, new_blocks)
        return True

    def _count_first_start(self, sequence: Sequence) -> None:
        sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
        self._counters.prefix_query_tokens += sequence.num_prompt
        self._counters.prefix_hit_tokens += sequence.num_cached_tokens
        self._counters.prompt_tokens += sequence.num_prompt

    def _has_free(self, num_blocks: int, sequence: Sequence) -> bool:
        if self._external is None:
            return self._pool.num_free >= num_blocks
        return self._external.loads.give_way(num_blocks, sequence)


def _start_of(sequence: Sequence) -> SequenceStart:
    assert sequence.slot is not None
    return SequenceStart(
        slot=sequence.slot,
        request=sequence.request,
        key=sequence.key,
        token_ids=tuple(sequence.token_ids),
        num_prompt=sequence.num_prompt,
        num_computed=sequence.num_computed,
        block_ids=tuple(sequence.block_ids),
        num_speculative_tokens=sequence.num_speculative_tokens,
    )
