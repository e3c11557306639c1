"""What becomes of sequences once a step has settled."""

from server.engine.protocol import FinishReason
from server.kv.block_pool import BlockPool
from server.kv_handle import ChoiceState
from server.plan import RowResult, StepResult
from server.scheduler.batch import RunningBatch
from server.scheduler.draft_control import DraftControl
from server.scheduler.external_kv import ExternalKV
from server.scheduler.live_sequences import LiveSequences
from server.scheduler.outputs import Failure, SequenceOutput
from server.scheduler.sequence import InFlight, Sequence
from server.scheduler.speculation_watch import SpeculationWatch
from server.scheduler.statistics import Counters, StepTime
from server.scheduler.stop_rules import apply_stop_rules


class StepSettler:
    """Appends tokens, publishes blocks that are full, ends what has ended; owned by the scheduler."""

    def __init__(
        self,
        block_size: int,
        pool: BlockPool,
        live: LiveSequences,
        batch: RunningBatch,
        counters: Counters,
        drafts: DraftControl,
        watch: SpeculationWatch,
        *,
        external: ExternalKV | None,
    ) -> None:
        self._block_size = block_size
        self._pool = pool
        self._live = live
        self._batch = batch
        self._counters = counters
        self._drafts = drafts
        self._watch = watch
        self._external = external

    def settle(self, result: StepResult, now: float) -> StepTime:
        """Take in a step that has settled. Returns: what speculation made of its time."""
        duration_s, draft_limit = self._drafts.settling(now)
        is_verifying = any(row.num_drafted for row in result.rows)
        draft_s = min(result.draft_s, duration_s)  # they are of different clocks
        step_time = StepTime(draft_s, duration_s - draft_s if is_verifying else 0.0)
        for row in result.rows:
            sequence = self._live.by_id.get(row.seq_id)
            if sequence is None:  # ended while in flight
                sequence = next(s for s in self._batch.draining if s.seq_id == row.seq_id)
                self._batch.settle_draining(sequence)
                continue
            assert row.epoch == sequence.epoch, "a sequence in flight was preempted"
            launched = sequence.in_flight.popleft()
            if row.error is not None:
                self._live.fail(sequence, Failure.REFUSED if row.is_refusal else Failure.BROKEN, row.error, now)
                continue
            if row.prompt_logprobs:
                sequence.prompt_logprobs += row.prompt_logprobs
            if launched.is_sampling:
                self._settle_tokens(sequence, launched, row, now, step_time)
            else:
                sequence.settle_chunk(launched)
                self._live.outputs.append(SequenceOutput.of(sequence, now))  # the caller learns that it was started
                self._publish(sequence)
        self._drafts.settle_step(now, is_usual=result.num_caught_up == 0)
        self._counters.count_step(draft_limit, step_time, is_verifying=is_verifying)
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
        self._counters.generation_tokens += num_kept
        if row.num_drafted:
            self._counters.count_drafts(row.num_drafted, num_accepted)
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
            is_first=is_first,
        )
        if reason is not None:
            stop_token_id = token_ids[-1] if reason is FinishReason.STOP else None
            output = output._replace(finish_reason=reason, stop_token_id=stop_token_id)
            self._live.end(sequence)
        self._live.outputs.append(output)
        if reason is None and sequence.request.hands_on:
            self._hand_on(sequence, now)

    def _hand_on(self, sequence: Sequence, now: float) -> None:
        """End a choice whose first token was streamed, for another node to go on with."""
        state = ChoiceState(tuple(sequence.token_ids[sequence.num_prompt :]), sequence.key)
        end: SequenceOutput | None = SequenceOutput.of(sequence, now)._replace(
            finish_reason=FinishReason.HANDED_ON, handed_on=state
        )
        assert end is not None
        if self._external is not None:
            end = self._external.saves.hand_on(sequence, end)
        self._live.end(sequence)
        if end is not None:
            self._live.outputs.append(end)

    def _publish(self, sequence: Sequence) -> None:
        """Share the blocks that are full of settled tokens."""
        num_full = sequence.num_computed // self._block_size
        hashes = sequence.hashes.up_to(sequence.token_ids, num_full)
        for i in range(sequence.num_published, num_full):
            self._pool.publish(sequence.block_ids[i], hashes[i])
            if self._external is not None:
                self._external.saves.offer(sequence.block_ids[i], hashes[i])
        sequence.num_published = num_full
