"""Decides, step by step, which tokens of which sequences are computed.

There is no prefill phase and no decode phase. A sequence has tokens that are known and tokens
whose KV is computed; each step spends a token budget on closing the gap, plus drafts to verify.
"""

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from typing import Any

from connectors.base import ConnectorScheduler, Finished
from server.config import SchedulerConfig
from server.engine.protocol import EngineStatistics
from server.kv.block_pool import BlockPool
from server.plan import StepPlan, StepResult
from server.request import ModelInfo, Request
from server.scheduler.batch import RunningBatch
from server.scheduler.choices import ChoiceMaker
from server.scheduler.draft_control import DraftControl
from server.scheduler.draft_policy import DraftPolicy, FixedPolicy
from server.scheduler.external_kv import ExternalKV
from server.scheduler.live_sequences import LiveSequences
from server.scheduler.outputs import Failure, SequenceOutput
from server.scheduler.sequence import Sequence
from server.scheduler.speculation_watch import SpeculationWatch
from server.scheduler.statistics import Counters, StepTime
from server.scheduler.step_planner import StepPlanner
from server.scheduler.step_settler import StepSettler
from server.scheduler.unreadable_handles import UnreadableHandles
from server.scheduler.waiting import WaitingQueue


class Scheduler:
    """Owns sequences, slots and blocks; lives on the step thread and is called by nobody else.

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
        self._pool = pool
        self._clock = clock
        self._fails_on_bad_loads = fails_on_bad_loads
        block_size = model_info.block_size
        self.counters = Counters()
        self.external = None
        if connector is not None:
            self.external = ExternalKV(connector, pool, block_size, clock, self.counters)
        self._unreadable = UnreadableHandles(reads_from, model_info.fingerprint.hex(), clock, self.counters)
        self._choices = ChoiceMaker(config, model_info, enable_prefix_caching=enable_prefix_caching)
        self._waiting = WaitingQueue()
        self._batch = RunningBatch(pool, config.max_num_seqs)
        self._live = LiveSequences(self._batch, self._waiting, self.external)
        self._drafts = DraftControl(draft_policy or FixedPolicy(model_info.num_speculative_tokens))
        self._watch = SpeculationWatch(self.counters)
        self._planner = StepPlanner(
            config,
            block_size,
            pool,
            self._waiting,
            self._batch,
            self.counters,
            self._drafts,
            num_lookahead_tokens=num_lookahead_tokens,
            external=self.external,
        )
        self._settler = StepSettler(
            block_size,
            pool,
            self._live,
            self._batch,
            self.counters,
            self._drafts,
            self._watch,
            external=self.external,
        )
        self.holds_admission = False

    @property
    def drafts(self) -> DraftControl:
        """Decides how many drafts are verified; to be changed between two steps only."""
        return self._drafts

    # -- requests come and go --------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue every choice of a request."""
        self._unreadable.check(request)
        self._live.add(request, self._choices.make(request))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, without an output; unknown ids are ignored."""
        self._live.abort(request_id, choice)

    def release(self, request_id: str) -> None:
        """Nobody goes on with what was handed on of a request; unknown ids are ignored."""
        if self.external is not None:
            self.external.saves.release(request_id)

    # -- steps -----------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Returns: None if nothing can be launched now."""
        now = self._clock()
        self._live.expire(now)
        if self.external is not None:
            self._take_in(*self.external.end_overdue(now))
            self.external.loads.renew(self._waiting, now)
        return self._planner.plan(now, holds_admission=self.holds_admission)

    def update(self, result: StepResult) -> StepTime:
        """Take in a settled step: append tokens, publish full blocks, end what has ended.

        Returns: what speculation made of the step's time.
        """
        return self._settler.settle(result, self._clock())

    def update_transfers(self, finished: Finished, bad_blocks: frozenset[int]) -> None:
        """Take in what a connector has done since the last time."""
        assert self.external is not None
        self._take_in(*self.external.settle(finished, bad_blocks))

    def _take_in(self, outputs: SequenceOf[SequenceOutput], failed: SequenceOf[Sequence]) -> None:
        """Args: failed: waiting sequences that did not get what could be loaded for them."""
        self._live.outputs += outputs
        if self._fails_on_bad_loads:
            now = self._clock()
            for sequence in failed:
                if not sequence.is_finished:
                    self._live.fail(sequence, Failure.BROKEN, "its KV could not be loaded", now)

    # -- what others may ask ---------------------------------------------------------------

    def take_outputs(self) -> list[SequenceOutput]:
        """The outputs since the last call, in order."""
        return self._live.take_outputs()

    @property
    def has_started(self) -> bool:
        """Whether a live sequence has run, even if it was preempted since."""
        return any(sequence.scheduled_s is not None for sequence in self._live.by_id.values())

    @property
    def has_requests(self) -> bool:
        """Whether anything waits, runs or drains, or is about to be handed on."""
        is_handing_on = self.external is not None and self.external.saves.is_handing_on
        return bool(self._live.by_id or self._batch.draining or is_handing_on)

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
