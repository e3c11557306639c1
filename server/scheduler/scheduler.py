"""Decides, step by step, which tokens of which sequences are computed.

There is no prefill phase and no decode phase. A sequence has tokens that are known and tokens
whose KV is computed; each step spends a token budget on closing the gap, plus drafts to verify.
"""

import math
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from typing import Any

from connectors.base import ConnectorScheduler, Finished
from server.config import SchedulerConfig
from server.engine.protocol import EngineStatistics, FinishReason
from server.kv.block_pool import BlockPool
from server.kv_handle import ChoiceState
from server.plan import PlanRow, RowResult, SequenceStart, StepPlan, StepResult
from server.request import ModelInfo, Request
from server.scheduler.admission import Admission
from server.scheduler.batch import RunningBatch
from server.scheduler.budget import TokenBudget
from server.scheduler.choices import ChoiceMaker
from server.scheduler.draft_control import DraftControl
from server.scheduler.draft_policy import DraftPolicy, FixedPolicy
from server.scheduler.external_kv import ExternalKV
from server.scheduler.kv_loads import Readiness
from server.scheduler.outputs import Failure, SequenceOutput
from server.scheduler.sequence import InFlight, Sequence
from server.scheduler.speculation_watch import SpeculationWatch
from server.scheduler.statistics import Counters, StepTime
from server.scheduler.stop_rules import apply_stop_rules
from server.scheduler.unreadable_handles import UnreadableHandles
from server.scheduler.waiting import WaitingQueue


class Scheduler:
    """Owns sequences, slots and blocks; lives on the step thread and is called by nobody else.

    Progress: rows are planned in a fixed order, a sequence in need of blocks preempts only later
    ones, and nobody is admitted in a step that ran out of blocks. So the first sequence advances
    in every step that it is not in flight in.

    Attributes:
        holds_admission: while set, sequences that never ran wait; those that were preempted go on.
        external: KV that comes from elsewhere and goes there; None without a connector.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        model_info: ModelInfo,
        pool: BlockPool,
        *,
        enable_prefix_caching: bool,
        clock: Callable[[], float],
        draft_policy: DraftPolicy | None = None,
        num_lookahead_tokens: int = 0,
        connector: ConnectorScheduler[Any] | None = None,
        reads_from: Collection[str] = (),
        fails_on_bad_loads: bool = False,
    ) -> None:
        """Args:
        draft_policy: as many drafts as the model's proposer makes, if None.
        num_lookahead_tokens: positions behind those of a step that a proposer writes to. The first of them is that of
            the step's newest token, and has a block always; the others have one where there are enough.
        connector: brings blocks from elsewhere and takes them there.
        reads_from: names of the connectors by which KV comes here, see KVHandle.
        fails_on_bad_loads: a request whose blocks could not be loaded ends with an error; otherwise they are computed.
        """
        self._config = config
        self._pool = pool
        self._clock = clock
        self._block_size = model_info.block_size
        self._choices = ChoiceMaker(config, model_info, enable_prefix_caching=enable_prefix_caching)
        self._batch = RunningBatch(pool, config.max_num_seqs)
        self._waiting = WaitingQueue()
        self.counters = Counters()
        self.external = None
        if connector is not None:
            self.external = ExternalKV(connector, pool, self._block_size, clock, self.counters)
        self._unreadable = UnreadableHandles(reads_from, clock, self.counters)
        self._admission = Admission(
            config,
            self._block_size,
            pool,
            self._waiting,
            self._batch,
            self.counters,
            num_reserved=min(1, num_lookahead_tokens),
            external=self.external,
        )
        self._by_id: dict[int, Sequence] = {}
        self._by_request: dict[str, list[Sequence]] = {}
        self._drafts = DraftControl(draft_policy or FixedPolicy(model_info.num_speculative_tokens))
        self._fails_on_bad_loads = fails_on_bad_loads
        self._num_lookahead_tokens = num_lookahead_tokens
        self._num_reserved = min(1, num_lookahead_tokens)
        self._earliest_deadline_s = math.inf
        self._outputs: list[SequenceOutput] = []
        self._watch = SpeculationWatch(self.counters)
        self.holds_admission = False

    @property
    def drafts(self) -> DraftControl:
        """Decides how many drafts are verified; to be changed between two steps only."""
        return self._drafts

    # -- requests come and go --------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue every choice of a request."""
        self._unreadable.check(request)
        for sequence in self._choices.make(request):
            self._by_id[sequence.seq_id] = sequence
            self._by_request.setdefault(request.request_id, []).append(sequence)
            self._waiting.add(sequence)
        if request.deadline_s is not None:
            self._earliest_deadline_s = min(self._earliest_deadline_s, request.deadline_s)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, without an output; unknown ids are ignored."""
        for sequence in list(self._by_request.get(request_id, ())):
            if choice is None or sequence.choice == choice:
                self._end(sequence)
        if self.external is not None:
            self.external.saves.abort(request_id, choice)
        if choice is None:
            self.release(request_id)

    def release(self, request_id: str) -> None:
        """Nobody goes on with what was handed on of a request; unknown ids are ignored."""
        if self.external is not None:
            self.external.saves.release(request_id)

    # -- a step is planned -----------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Returns: None if nothing can be launched now."""
        now = self._clock()
        if now >= self._earliest_deadline_s:
            self._expire(now)
        if self.external is not None:
            self._take_in(*self.external.end_overdue(now))
            self.external.loads.renew(self._waiting, now)
        held = self._make_room()
        rows: list[PlanRow] = []
        starts: list[SequenceStart] = []
        budget = TokenBudget(self._config, self._batch.sequences, has_waiting=bool(self._waiting))
        is_short_of_blocks = is_speculating = False
        self._drafts.begin(len(self._batch))
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
            for sequence, start, wanted in self._admission.admit(budget, now, is_held=self.holds_admission):
                starts.append(start)
                budget.take(wanted)
                end = sequence.num_computed + wanted.num_query
                rows.append(self._launch_row(sequence, wanted, end, self._look_ahead(sequence, wanted, end)))
        if not rows:
            return None
        self.counters.num_steps += 1
        is_decoding = all(row.is_sampling and row.num_query == 1 + row.num_drafts for row in rows)
        num_proposed = self._drafts.launch(now, len(rows), is_decoding=is_decoding, is_speculating=is_speculating)
        transfers = None if self.external is None else self.external.plan()
        return StepPlan(tuple(starts), tuple(rows), num_proposed, transfers)

    def _launch_row(self, sequence: Sequence, wanted: InFlight, end: int, new_block_ids: list[int]) -> PlanRow:
        assert sequence.slot is not None
        num_query, num_drafts, is_sampling, _ = wanted
        num_logprobs = None
        # The prompt's last position has the first output token as its target.
        if sequence.computed_upper < sequence.num_prompt - 1 and sequence.needs_prompt_logprobs:
            num_logprobs = sequence.request.sampling.prompt_logprobs
        if self.external is not None:
            self.external.saves.launch(sequence, wanted, end)
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
            if self.external is not None and self.external.loads.give_way(count):
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
        self.counters.num_preemptions += 1

    # -- a step has settled ----------------------------------------------------------------

    def update(self, result: StepResult) -> StepTime:
        """Take in a settled step: append tokens, publish full blocks, end what has ended.

        Returns: what speculation made of the step's time.
        """
        now = self._clock()
        duration_s, draft_limit = self._drafts.settling(now)
        is_verifying = any(row.num_drafted for row in result.rows)
        draft_s = min(result.draft_s, duration_s)  # they are of different clocks
        step_time = StepTime(draft_s, duration_s - draft_s if is_verifying else 0.0)
        for row in result.rows:
            sequence = self._by_id.get(row.seq_id)
            if sequence is None:  # ended while in flight
                sequence = next(s for s in self._batch.draining if s.seq_id == row.seq_id)
                self._batch.settle_draining(sequence)
                continue
            assert row.epoch == sequence.epoch, "a sequence in flight was preempted"
            launched = sequence.in_flight.popleft()
            if row.error is not None:
                self._fail(sequence, Failure.REFUSED if row.is_refusal else Failure.BROKEN, row.error, now)
                continue
            if row.prompt_logprobs:
                sequence.prompt_logprobs += row.prompt_logprobs
            if launched.is_sampling:
                self._settle_tokens(sequence, launched, row, now, step_time)
            else:
                sequence.settle_chunk(launched)
                self._outputs.append(self._output(sequence, now))  # the caller learns that it was started
                self._publish(sequence)
        self._drafts.settle_step(now, is_usual=result.num_caught_up == 0)
        self.counters.count_step(draft_limit, step_time, is_verifying=is_verifying)
        self._watch.settle_step(duration_s, step_time, is_verifying=is_verifying, policy=self._drafts.policy)
        return step_time

    def _settle_tokens(
        self, sequence: Sequence, launched: InFlight, row: RowResult, now: float, step_time: StepTime
    ) -> None:
        is_first = len(sequence.token_ids) == sequence.num_prompt
        token_ids, reason = apply_stop_rules(sequence, row.token_ids)
        num_kept = len(token_ids)
        num_accepted = len(row.token_ids) - 1
        if num_accepted > num_kept:
            num_accepted = num_kept
        sequence.settle_tokens(launched, num_accepted, token_ids)
        self._drafts.settle_row(launched.num_allowed, num_accepted)
        sequence.num_next_drafts = row.num_next_drafts
        if sequence.num_computed // self._block_size > sequence.num_published:
            self._publish(sequence)
        self.counters.generation_tokens += num_kept
        if row.num_drafted:
            self.counters.count_drafts(row.num_drafted, num_accepted)
        output = SequenceOutput(
            sequence.request,
            sequence.choice,
            sequence.scheduled_s,
            now,
            sequence.num_cached_tokens,
            token_ids,
            row.logprobs[:num_kept],
            tuple(sequence.prompt_logprobs) if is_first else (),
            row.num_drafted,
            num_accepted,
            step_time,
            transfer_s=sequence.transfer_s,
        )
        if reason is not None:
            stop_token_id = token_ids[-1] if reason is FinishReason.STOP else None
            output = output._replace(finish_reason=reason, stop_token_id=stop_token_id)
            self._end(sequence)
        self._outputs.append(output)
        if reason is None and sequence.request.hands_on:
            self._hand_on(sequence, now)

    def _hand_on(self, sequence: Sequence, now: float) -> None:
        """End a choice whose first token was streamed, for another node to go on with."""
        state = ChoiceState(tuple(sequence.token_ids[sequence.num_prompt :]), sequence.key)
        end: SequenceOutput | None = self._output(sequence, now)._replace(
            finish_reason=FinishReason.HANDED_ON, handed_on=state
        )
        assert end is not None
        if self.external is not None:
            end = self.external.saves.hand_on(sequence, end)
        self._end(sequence)
        if end is not None:
            self._outputs.append(end)

    def _publish(self, sequence: Sequence) -> None:
        """Share the blocks that are full of settled tokens."""
        num_full = sequence.num_computed // self._block_size
        hashes = sequence.hashes.up_to(sequence.token_ids, num_full)
        for i in range(sequence.num_published, num_full):
            self._pool.publish(sequence.block_ids[i], hashes[i])
            if self.external is not None:
                self.external.saves.offer(sequence.block_ids[i], hashes[i])
        sequence.num_published = num_full

    def update_transfers(self, finished: Finished, bad_blocks: frozenset[int]) -> None:
        """Take in what a connector has done since the last time."""
        assert self.external is not None
        self._take_in(*self.external.settle(finished, bad_blocks))

    def _take_in(self, outputs: SequenceOf[SequenceOutput], failed: SequenceOf[Sequence]) -> None:
        """Args: failed: waiting sequences that did not get what could be loaded for them."""
        self._outputs += outputs
        if self._fails_on_bad_loads:
            now = self._clock()
            for sequence in failed:
                if not sequence.is_finished:
                    self._fail(sequence, Failure.BROKEN, "its KV could not be loaded", now)

    def _expire(self, now: float) -> None:
        """End requests whose deadline has passed; a queued one is never started."""
        earliest_s = math.inf
        for choices in list(self._by_request.values()):
            deadline_s = choices[0].request.deadline_s
            if deadline_s is None:
                continue
            if deadline_s > now:
                earliest_s = min(earliest_s, deadline_s)
                continue
            is_running = any(sequence.scheduled_s is not None for sequence in choices)
            self._fail(choices[0], Failure.EXPIRED, "running" if is_running else "queued", now)
        self._earliest_deadline_s = earliest_s

    def _fail(self, sequence: Sequence, failure: Failure, error: str, now: float) -> None:
        """End a whole request with an error."""
        self._outputs.append(self._output(sequence, now)._replace(failure=failure, error=error))
        self.abort(sequence.request.request_id)

    def _output(self, sequence: Sequence, now: float) -> SequenceOutput:
        """What is known of a choice, without news."""
        return SequenceOutput(
            sequence.request,
            sequence.choice,
            sequence.scheduled_s,
            now,
            sequence.num_cached_tokens,
            transfer_s=sequence.transfer_s,
        )

    def _end(self, sequence: Sequence) -> None:
        sequence.is_finished = True
        del self._by_id[sequence.seq_id]
        siblings = self._by_request[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[sequence.request.request_id]
            if self.external is not None:
                self.external.saves.forget(sequence.request.request_id)
        if sequence.slot is None:
            self._waiting.remove(sequence)
            if self.external is not None:
                self.external.loads.leave(sequence)
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
        """Whether anything waits, runs or drains, or is about to be handed on."""
        is_handing_on = self.external is not None and self.external.saves.is_handing_on
        return bool(self._by_id or self._batch.draining or is_handing_on)

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
            draft_tokens_per_position=counters.drafted,
            accepted_tokens_per_position=counters.accepted,
            steps_per_draft_limit=counters.steps_per_draft_limit,
            draft_seconds=counters.draft_s,
            verify_seconds=counters.verify_s,
            num_draft_steps=counters.num_draft_steps,
            num_verify_steps=counters.num_verify_steps,
            external_queried_tokens=counters.external_queried_tokens,
            external_loaded_tokens=counters.external_loaded_tokens,
            num_failed_loads=counters.num_failed_loads,
            num_unsaved_blocks=counters.num_unsaved_blocks,
            save_failures={str(failure): count for failure, count in counters.save_failures.items()},
            num_unreadable_handles=counters.num_unreadable_handles,
            num_held_blocks=0 if self.external is None else len(self.external.held),
            speculation_advice=self._watch.advice if self._drafts.is_on else {},
        )

    def check_integrity(self) -> None:
        """Assert that every block is either free or held by someone; callable when idle."""
        self._pool.check_integrity()
        holders = [*self._batch.sequences, *self._batch.draining]
        held = {block_id for sequence in holders for block_id in sequence.block_ids}
        if self.external is not None:
            held |= self.external.held.block_ids
        assert len(held) == self._pool.num_usable - self._pool.num_free
