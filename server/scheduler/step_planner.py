"""Which rows the next step has, and which blocks they need."""

from server.config import SchedulerConfig
from server.kv.block_pool import BlockPool
from server.plan import PlanRow, SequenceStart, StepPlan
from server.scheduler.admission import Admission
from server.scheduler.batch import RunningBatch
from server.scheduler.budget import TokenBudget
from server.scheduler.draft_control import DraftControl
from server.scheduler.external_kv import ExternalKV
from server.scheduler.kv_loads import Readiness
from server.scheduler.sequence import InFlight, Sequence
from server.scheduler.statistics import Counters
from server.scheduler.waiting import WaitingQueue


class StepPlanner:
    """Shares a step's tokens and the free blocks out among sequences; owned by the scheduler.

    Progress: rows are planned in a fixed order, a sequence in need of blocks preempts only later
    ones, and nobody is admitted in a step that ran out of blocks. So the first sequence advances
    in every step that it is not in flight in.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_size: int,
        pool: BlockPool,
        waiting: WaitingQueue,
        batch: RunningBatch,
        counters: Counters,
        drafts: DraftControl,
        *,
        num_lookahead_tokens: int,
        external: ExternalKV | None,
    ) -> None:
        """Args: num_lookahead_tokens: see Scheduler."""
        self._config = config
        self._block_size = block_size
        self._pool = pool
        self._waiting = waiting
        self._batch = batch
        self._counters = counters
        self._drafts = drafts
        self._num_lookahead_tokens = num_lookahead_tokens
        self._num_reserved = min(1, num_lookahead_tokens)
        self._external = external
        self._admission = Admission(
            config, block_size, pool, waiting, batch, counters, num_reserved=self._num_reserved, external=external
        )

    def plan(self, now: float, *, holds_admission: bool) -> StepPlan | None:
        """Plan the next step. Returns: None if nothing can be launched now."""
        held = self._make_room()
        rows: list[PlanRow] = []
        starts: list[SequenceStart] = []
        budget = TokenBudget(self._config, self._batch.sequences, has_waiting=bool(self._waiting))
        is_short_of_blocks = is_speculating = False
        self._drafts.begin(len(self._batch), min(len(self._waiting), self._config.max_num_seqs))
        for sequence in list(self._batch.sequences):
            if sequence.slot is None or sequence in held:
                continue  # preempted or held back for one that goes before it
            wanted = budget.offer(sequence, self._drafts.allow(sequence))
            if wanted is None:
                continue
            end = sequence.computed_upper + wanted.num_query
            if end > sequence.limit:
                end = sequence.limit
            new_block_ids: list[int] = []
            if end + self._num_reserved > len(sequence.block_ids) * self._block_size:
                wanted = self._fit_drafts(sequence, wanted)
                end = min(sequence.computed_upper + wanted.num_query, sequence.limit)
                grown = self._grow(sequence, min(end + self._num_reserved, sequence.limit), budget, held)
                if grown is None:
                    is_short_of_blocks = True
                    continue
                new_block_ids = grown
            new_block_ids += self._look_ahead(sequence, wanted, end)
            if sequence.num_speculative_tokens and sequence.computed_upper >= sequence.num_prompt:
                is_speculating = True
            budget.take(wanted)
            rows.append(self._launch_row(sequence, wanted, end, new_block_ids))
        if not is_short_of_blocks and not held:
            for sequence, start, wanted in self._admission.admit(budget, now, is_held=holds_admission):
                starts.append(start)
                budget.take(wanted)
                end = sequence.num_computed + wanted.num_query
                rows.append(self._launch_row(sequence, wanted, end, self._look_ahead(sequence, wanted, end)))
        if not rows:
            return None
        self._counters.num_steps += 1
        is_decoding = all(row.is_sampling and row.num_query == 1 + row.num_drafts for row in rows)
        num_proposed = self._drafts.launch(now, len(rows), is_decoding=is_decoding, is_speculating=is_speculating)
        transfers = None if self._external is None else self._external.plan()
        return StepPlan(tuple(starts), tuple(rows), num_proposed, transfers)

    def _launch_row(self, sequence: Sequence, wanted: InFlight, end: int, new_block_ids: list[int]) -> PlanRow:
        assert sequence.slot is not None
        num_query, num_drafts, is_sampling, _ = wanted
        num_logprobs = None
        # The prompt's last position has the first output token as its target.
        if sequence.computed_upper < sequence.num_prompt - 1 and sequence.needs_prompt_logprobs:
            num_logprobs = sequence.request.sampling.prompt_logprobs
        if self._external is not None:
            self._external.saves.launch(sequence, wanted, end)
        sequence.launch(wanted)
        # By position, as names cost as much as the row itself.
        return PlanRow(
            sequence.slot,
            sequence.seq_id,
            sequence.epoch,
            num_query,
            num_drafts,
            end,
            is_sampling,
            tuple(new_block_ids),
            num_logprobs,
        )

    def _make_room(self) -> set[Sequence]:
        """Under the priority policy, give up the last running sequence's seat for one that goes before it.

        Returns: that sequence if it is in flight: held back now, it can be preempted once it has settled.
        """
        if self._config.scheduling_policy != "priority" or self._batch.has_free_slot or self._batch.draining:
            return set()
        victim = self._batch.sequences[-1]
        if not any(self._could_start(sequence) for sequence in self._waiting.before(victim)):
            return set()
        if victim.in_flight:
            return {victim}
        self._preempt(victim)
        return set()

    def _could_start(self, sequence: Sequence) -> bool:
        return sequence.is_ready() and self._admission.readiness(sequence) is not Readiness.LOADING

    def _fit_drafts(self, sequence: Sequence, wanted: InFlight) -> InFlight:
        """As many of the drafts as free blocks have room for: nobody is preempted for a guess."""
        num_positions = (len(sequence.block_ids) + self._pool.num_free) * self._block_size - sequence.computed_upper
        num_unfit = min(wanted.num_drafts, max(0, wanted.num_query + self._num_reserved - num_positions))
        return wanted._replace(num_query=wanted.num_query - num_unfit, num_drafts=wanted.num_drafts - num_unfit)

    def _grow(self, sequence: Sequence, end: int, budget: TokenBudget, held: set[Sequence]) -> list[int] | None:
        """Blocks for positions below `end`, preempting later sequences; None if it must wait."""
        count = max(0, -(-end // self._block_size) - len(sequence.block_ids))
        while (new_blocks := self._pool.allocate(count)) is None:
            if self._external is not None and self._external.loads.give_way(count):
                continue
            victim = self._batch.sequences[-1]
            if victim is sequence:
                return None  # those before it have theirs already; it keeps what it has and waits
            if victim.in_flight:
                held.add(victim)
                return None
            budget.forgo(victim)
            self._preempt(victim)
        sequence.block_ids += new_blocks
        return new_blocks

    def _look_ahead(self, sequence: Sequence, wanted: InFlight, end: int) -> list[int]:
        """Blocks that drafts behind position `end` are written to, as long as each running sequence can have one."""
        if not (self._num_lookahead_tokens and wanted.is_sampling):
            return []
        end = min(end + self._num_lookahead_tokens, sequence.limit)
        count = -(-end // self._block_size) - len(sequence.block_ids)
        if count <= 0 or self._pool.num_free < count + len(self._batch):
            return []
        new_blocks = self._pool.allocate(count)
        assert new_blocks is not None
        sequence.block_ids += new_blocks
        return new_blocks

    def _preempt(self, sequence: Sequence) -> None:
        """Give up a sequence's slot and blocks; it will recompute from its tokens."""
        self._batch.remove(sequence)
        sequence.epoch += 1
        sequence.restart(num_computed=0)
        if sequence.needs_prompt_logprobs:
            sequence.prompt_logprobs.clear()
        self._waiting.add(sequence)
        self._counters.num_preemptions += 1
