"""Decides, step by step, which tokens of which sequences are computed.

There is no prefill phase and no decode phase. A sequence has tokens that are known and tokens
whose KV is computed; each step spends a token budget on closing the gap, plus drafts to verify.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from server.config import SchedulerConfig
from server.engine.protocol import EngineStatistics, FinishReason
from server.kv.block_pool import BlockPool
from server.kv.prefix_cache import BlockHashes, longest_hit, root_hash
from server.plan import PlanRow, RowResult, SequenceStart, StepPlan, StepResult
from server.request import ModelInfo, Request
from server.scheduler.batch import RunningBatch
from server.scheduler.budget import TokenBudget
from server.scheduler.outputs import Failure, SequenceOutput
from server.scheduler.policy import order_key
from server.scheduler.sequence import InFlight, Sequence, sampling_key
from server.scheduler.statistics import Counters
from server.scheduler.stop_rules import apply_stop_rules
from server.scheduler.waiting import WaitingQueue


class Scheduler:
    """Owns sequences, slots and blocks; lives on the step thread and is called by nobody else.

    Progress: rows are planned in a fixed order, a sequence in need of blocks preempts only later
    ones, and nobody is admitted in a step that ran out of blocks. So the first sequence advances
    in every step that it is not in flight in.

    Attributes:
        holds_admission: while set, sequences that never ran wait; those that were preempted go on.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        model_info: ModelInfo,
        pool: BlockPool,
        *,
        enable_prefix_caching: bool,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._info = model_info
        self._pool = pool
        self._enable_prefix_caching = enable_prefix_caching
        self._clock = clock
        self._block_size = model_info.block_size
        self._watermark = int(config.watermark * pool.num_usable)
        self._batch = RunningBatch(pool, config.max_num_seqs)
        self._waiting = WaitingQueue()
        self._by_id: dict[int, Sequence] = {}
        self._by_request: dict[str, list[Sequence]] = {}
        self._next_seq_id = 0
        self._outputs: list[SequenceOutput] = []
        self.counters = Counters()
        self.holds_admission = False

    # -- requests come and go --------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue every choice of a request; later choices wait for the first one's prompt blocks."""
        primary = order_key(request, self._config.scheduling_policy, self._config.priority_ageing_seconds)
        fingerprint = self._info.fingerprint
        if not self._enable_prefix_caching:  # a root of its own: the choices share blocks, nobody else does
            fingerprint += b"/%d" % self._next_seq_id
        root = root_hash(fingerprint, request.cache_salt)
        shares_blocks = len(request.prompt_token_ids) > self._block_size
        leader: Sequence | None = None
        for choice in range(request.sampling.n):
            sequence = Sequence(
                seq_id=self._next_seq_id,
                request=request,
                choice=choice,
                order=(primary, self._next_seq_id),
                hashes=BlockHashes(root, self._block_size),
                num_speculative_tokens=self._speculative_tokens(request),
                key=sampling_key(request.sampling.seed, choice),
                leader=leader,
                token_ids=list(request.prompt_token_ids),
            )
            if choice == 0 and shares_blocks:
                leader = sequence
            self._next_seq_id += 1
            self._by_id[sequence.seq_id] = sequence
            self._by_request.setdefault(request.request_id, []).append(sequence)
            self._waiting.add(sequence)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, without an output; unknown ids are ignored."""
        for sequence in list(self._by_request.get(request_id, ())):
            if choice is None or sequence.choice == choice:
                self._end(sequence)

    def _speculative_tokens(self, request: Request) -> int:
        if not request.speculation.enabled:
            return 0
        wanted = request.speculation.num_speculative_tokens
        most = self._info.num_speculative_tokens
        return most if wanted is None else min(wanted, most)

    # -- a step is planned -----------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Returns: None if nothing can be launched now."""
        now = self._clock()
        self._expire(now)
        held = self._make_room()
        rows: list[PlanRow] = []
        budget = TokenBudget(self._config, self._batch.sequences, has_waiting=bool(self._waiting))
        is_short_of_blocks = False
        for sequence in list(self._batch.sequences):
            if sequence.slot is None or sequence in held:
                continue  # preempted or held back for one that goes before it
            wanted = budget.offer(sequence)
            if wanted is None:
                continue
            wanted = self._fit_drafts(sequence, wanted)
            end = min(sequence.computed_upper + wanted.num_query, sequence.limit)
            new_blocks = self._grow(sequence, end, held)
            if new_blocks is None:
                is_short_of_blocks = True
                continue
            budget.take(wanted)
            rows.append(self._launch_row(sequence, wanted, new_blocks))
        starts = [] if is_short_of_blocks or held else self._admit(budget, rows, now)
        if not rows:
            return None
        self.counters.num_steps += 1
        return StepPlan(starts=tuple(starts), rows=tuple(rows))

    def _launch_row(self, sequence: Sequence, wanted: InFlight, new_blocks: list[int]) -> PlanRow:
        assert sequence.slot is not None
        start = sequence.computed_upper
        is_in_prompt = start < sequence.num_prompt - 1  # the last position has the first output token as its target
        wants_prompt_logprobs = is_in_prompt and sequence.needs_prompt_logprobs
        row = PlanRow(
            slot=sequence.slot,
            seq_id=sequence.seq_id,
            epoch=sequence.epoch,
            num_query=wanted.num_query,
            num_drafts=wanted.num_drafts,
            context_bound=min(start + wanted.num_query, sequence.limit),
            is_sampling=wanted.is_sampling,
            new_block_ids=tuple(new_blocks),
            num_prompt_logprobs=sequence.request.sampling.prompt_logprobs if wants_prompt_logprobs else None,
        )
        sequence.in_flight.append(wanted)
        return row

    def _make_room(self) -> set[Sequence]:
        """Under the priority policy, give up the last running sequence's seat for one that goes before it.

        Returns: that sequence if it is in flight: held back now, it can be preempted once it has settled.
        """
        if self._config.scheduling_policy != "priority" or self._batch.has_free_slot or self._batch.draining:
            return set()
        first, victim = self._waiting.first_ready(), self._batch.sequences[-1]
        if first is None or first.order > victim.order:
            return set()
        if victim.in_flight:
            return {victim}
        self._preempt(victim)
        return set()

    def _fit_drafts(self, sequence: Sequence, wanted: InFlight) -> InFlight:
        """As many of the drafts as free blocks have room for: nobody is preempted for a guess."""
        num_positions = (len(sequence.block_ids) + self._pool.num_free) * self._block_size - sequence.computed_upper
        num_unfit = min(wanted.num_drafts, max(0, wanted.num_query - num_positions))
        return replace(wanted, num_query=wanted.num_query - num_unfit, num_drafts=wanted.num_drafts - num_unfit)

    def _grow(self, sequence: Sequence, end: int, held: set[Sequence]) -> list[int] | None:
        """Blocks for positions below `end`, preempting later sequences; None if it must wait."""
        count = max(0, -(-end // self._block_size) - len(sequence.block_ids))
        while (new_blocks := self._pool.allocate(count)) is None:
            victim = self._batch.sequences[-1]
            if victim is sequence:
                return None  # those before it have theirs already; it keeps what it has and waits
            if victim.in_flight:
                held.add(victim)
                return None
            self._preempt(victim)
        sequence.block_ids += new_blocks
        return new_blocks

    def _preempt(self, sequence: Sequence) -> None:
        """Give up a sequence's slot and blocks; it will recompute from its tokens."""
        self._batch.remove(sequence)
        sequence.epoch += 1
        sequence.num_computed = 0
        sequence.num_next_drafts = 0
        if sequence.needs_prompt_logprobs:
            sequence.prompt_logprobs.clear()
        self._waiting.add(sequence)
        self.counters.num_preemptions += 1

    def _admit(self, budget: TokenBudget, rows: list[PlanRow], now: float) -> list[SequenceStart]:
        """Start waiting sequences, in order, while seats, blocks and budget last."""
        starts: list[SequenceStart] = []
        for sequence in self._waiting:
            if not sequence.is_ready() or (self.holds_admission and sequence.scheduled_s is None):
                continue
            if not self._batch.has_free_slot:
                break
            start = self._try_start(sequence, budget)
            if start is None:
                break
            self._waiting.remove(sequence)
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now
            starts.append(start)
            wanted = budget.offer(sequence)
            assert wanted is not None
            budget.take(wanted)
            rows.append(self._launch_row(sequence, wanted, []))
        return starts

    def _try_start(self, sequence: Sequence, budget: TokenBudget) -> SequenceStart | None:
        """Seat a waiting sequence if all its known tokens fit above the watermark, else None."""
        tokens = sequence.token_ids
        hit: list[int] = []
        if not sequence.needs_prompt_logprobs:  # the last token is always computed: its logits are needed
            hit = longest_hit(self._pool, sequence.hashes.up_to(tokens, (len(tokens) - 1) // self._block_size))
        num_cached = len(hit) * self._block_size
        if not budget.admits(len(tokens) - num_cached):
            return None
        num_new = -(-len(tokens) // self._block_size) - len(hit)
        num_free = self._pool.num_free - sum(self._pool.is_free(block_id) for block_id in hit)
        reserve = self._watermark if len(self._batch) else 0
        if num_free - num_new < reserve:
            return None
        self._pool.acquire(hit)
        new_blocks = self._pool.allocate(num_new)
        assert new_blocks is not None
        self._batch.add(sequence, hit, new_blocks)
        sequence.num_computed = num_cached
        if sequence.scheduled_s is None:
            sequence.num_cached_tokens = min(num_cached, sequence.num_prompt)
            self.counters.prefix_query_tokens += sequence.num_prompt
            self.counters.prefix_hit_tokens += sequence.num_cached_tokens
            self.counters.prompt_tokens += sequence.num_prompt
        assert sequence.slot is not None
        return SequenceStart(
            slot=sequence.slot,
            request=sequence.request,
            key=sequence.key,
            token_ids=tuple(tokens),
            num_prompt=sequence.num_prompt,
            num_computed=num_cached,
            block_ids=tuple(sequence.block_ids),
            num_speculative_tokens=sequence.num_speculative_tokens,
        )

    # -- a step has settled ----------------------------------------------------------------

    def update(self, result: StepResult) -> None:
        """Take in a settled step: append tokens, publish full blocks, end what has ended."""
        now = self._clock()
        for row in result.rows:
            sequence = self._by_id.get(row.seq_id)
            if sequence is None:  # ended while in flight
                sequence = next(s for s in self._batch.draining if s.seq_id == row.seq_id)
                self._batch.settle_draining(sequence)
                continue
            assert row.epoch == sequence.epoch, "a sequence in flight was preempted"
            self._settle_row(sequence, row, now)

    def _settle_row(self, sequence: Sequence, row: RowResult, now: float) -> None:
        launched = sequence.in_flight.popleft()
        if row.error is not None:
            self._fail(sequence, Failure.REFUSED if row.is_refusal else Failure.BROKEN, row.error, now)
            return
        sequence.prompt_logprobs += row.prompt_logprobs
        if not launched.is_sampling:
            sequence.num_computed += launched.num_query
            self._publish(sequence)
            self._report(sequence, now)  # the caller learns that it was started
            return
        is_first = len(sequence.token_ids) == sequence.num_prompt
        num_accepted = len(row.token_ids) - 1
        sequence.num_computed = len(sequence.token_ids) + num_accepted
        kept, reason = apply_stop_rules(sequence, row.token_ids)
        sequence.token_ids += kept
        sequence.num_next_drafts = row.num_next_drafts
        self._publish(sequence)
        num_accepted = min(num_accepted, len(kept))
        self.counters.generation_tokens += len(kept)
        self.counters.count_drafts(row.num_drafted, num_accepted)
        self._report(
            sequence,
            now,
            token_ids=tuple(kept),
            logprobs=row.logprobs[: len(kept)],
            prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first else (),
            num_drafted=row.num_drafted,
            num_accepted=num_accepted,
            finish_reason=reason,
            stop_token_id=kept[-1] if reason is FinishReason.STOP else None,
        )
        if reason is not None:
            self._end(sequence)

    def _publish(self, sequence: Sequence) -> None:
        """Share the blocks that are full of settled tokens."""
        num_full = min(sequence.num_computed, len(sequence.token_ids)) // self._block_size
        if num_full <= sequence.num_published:
            return
        hashes = sequence.hashes.up_to(sequence.token_ids, num_full)
        for i in range(sequence.num_published, num_full):
            self._pool.publish(sequence.block_ids[i], hashes[i])
        sequence.num_published = num_full

    def _expire(self, now: float) -> None:
        """End requests whose deadline has passed; a queued one is never started."""
        for choices in list(self._by_request.values()):
            deadline = choices[0].request.deadline_s
            if deadline is not None and deadline <= now:
                is_running = any(sequence.scheduled_s is not None for sequence in choices)
                self._fail(choices[0], Failure.EXPIRED, "running" if is_running else "queued", now)

    def _fail(self, sequence: Sequence, failure: Failure, error: str, now: float) -> None:
        """End a whole request with an error."""
        self._report(sequence, now, failure=failure, error=error)
        self.abort(sequence.request.request_id)

    def _report(self, sequence: Sequence, now: float, **news: Any) -> None:
        self._outputs.append(
            SequenceOutput(
                request=sequence.request,
                choice=sequence.choice,
                scheduled_s=sequence.scheduled_s,
                settled_s=now,
                num_cached_tokens=sequence.num_cached_tokens,
                **news,
            )
        )

    def _end(self, sequence: Sequence) -> None:
        sequence.is_finished = True
        del self._by_id[sequence.seq_id]
        siblings = self._by_request[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[sequence.request.request_id]
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._batch.remove(sequence)

    # -- what others may ask ---------------------------------------------------------------

    def take_outputs(self) -> list[SequenceOutput]:
        """The outputs since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def has_started(self) -> bool:
        """Whether a live sequence has run, even if it was preempted since."""
        return any(sequence.scheduled_s is not None for sequence in self._by_id.values())

    @property
    def has_requests(self) -> bool:
        """Whether anything waits, runs or drains."""
        return bool(self._by_id or self._batch.draining)

    def statistics(self) -> EngineStatistics:
        """A frozen snapshot."""
        counters = self.counters
        return EngineStatistics(
            num_running=len(self._batch),
            num_waiting=self._waiting.num_requests,
            kv_blocks_total=self._pool.num_usable,
            kv_blocks_free=self._pool.num_free,
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            num_preemptions=counters.num_preemptions,
            num_steps=counters.num_steps,
            draft_tokens_per_position=tuple(counters.drafted),
            accepted_tokens_per_position=tuple(counters.accepted),
        )

    def check_integrity(self) -> None:
        """Assert that every block is either free or held by someone; callable when idle."""
        self._pool.check_integrity()
        holders = [*self._batch.sequences, *self._batch.draining]
        held = {block_id for sequence in holders for block_id in sequence.block_ids}
        assert len(held) == self._pool.num_usable - self._pool.num_free
