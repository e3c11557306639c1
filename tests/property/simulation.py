"""Random traffic on a scheduler and a fake device, checked after each step."""

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from server.engine.protocol import FinishReason
from server.plan import RowResult, StepPlan, StepResult
from server.request import Request
from server.scheduler.outputs import Failure, SequenceOutput
from server.scheduler.sequence import Sequence
from tests.fakes.core import Core, make_core, make_request
from tests.fakes.executor import VOCAB_SIZE, FakeExecutor, InjectedError, reference, token_logprobs

MAX_STALLED_STEPS = 3
"""Steps the first sequence may go without a row: one that ends it is in flight, one waits for a held-back victim,
one for what drains."""
MAX_DRAIN_STEPS = 3000
"""Steps to finish at most 12 requests of 4 choices and 20 tokens, one sequence and one token at a time."""
MAX_WAITING_STEPS = 200
"""Steps the first sequence may wait for a seat, far more than those with one can need to end."""


@dataclass
class Expected:
    """One choice as the test knows it."""

    request: Request
    index: int
    tokens: list[int] = field(default_factory=list)
    num_cached: int | None = None
    is_over: bool = False
    end: SequenceOutput | None = None

    def take(self, output: SequenceOutput) -> None:
        """Check an output against what the choice would generate alone."""
        where = f"{output.request_id}/{self.index}"
        assert not self.is_over, f"{where} has ended already"
        expected, reason = reference(self.request, self.index)
        num_before, num_prompt = len(self.tokens), len(self.request.prompt_token_ids)
        self.tokens += output.token_ids
        if self.request.hands_on and len(expected) > 1:
            expected, reason = expected[:1], FinishReason.HANDED_ON
        assert self.tokens == expected[: len(self.tokens)], where
        assert output.scheduled_s is not None or output.failure is not None
        if self.request.sampling.logprobs is not None:
            first = num_prompt + num_before
            assert output.logprobs == tuple(token_logprobs(t, i) for i, t in enumerate(output.token_ids, first))
        self._take_prompt_logprobs(output, is_first=num_before == 0 and bool(output.token_ids))
        if output.scheduled_s is not None:
            assert output.num_cached_tokens == self.num_cached, where
        assert output.num_accepted <= output.num_drafted
        assert output.num_accepted <= len(output.token_ids)
        if output.finish_reason is not None:
            self.is_over = True
            self.end = output
            assert (self.tokens, output.finish_reason) == (expected, reason), where
            assert output.stop_token_id == (expected[-1] if reason is FinishReason.STOP else None)

    def _take_prompt_logprobs(self, output: SequenceOutput, *, is_first: bool) -> None:
        prompt = self.request.prompt_token_ids
        is_wanted = self.request.sampling.prompt_logprobs is not None and self.request.continuation is None
        if not is_first or self.index > 0 or not is_wanted:
            assert output.prompt_logprobs == ()
        else:
            assert output.prompt_logprobs == tuple(token_logprobs(prompt[i], i) for i in range(1, len(prompt)))


class Simulation:
    """A core, random callers, and the rules that must hold after every step.

    `depth` steps are launched ahead of the one being settled, as the engine does.
    """

    max_stalled_steps = MAX_STALLED_STEPS
    max_waiting_steps = MAX_WAITING_STEPS

    def __init__(
        self,
        seed: int,
        *,
        depth: int,
        policy: str,
        writes_kv: bool = False,
        executor_class: type[FakeExecutor] = FakeExecutor,
        **core: Any,
    ) -> None:
        """Args: writes_kv: whether drafting writes to the sequences' blocks. core: further arguments of it."""
        self.rng = rng = random.Random(seed)
        self.depth = depth
        self.block_size = rng.choice((1, 2, 4, 8))
        self.max_drafts = rng.choice((0, 0, 1, 3, 5))
        max_num_seqs = rng.randint(1, 6)
        self.config: dict[str, Any] = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_seqs + rng.choice((0, 1, 5, 20, 100)),
            "long_prefill_token_threshold": rng.choice((0, 0, 1, 3, 8)),
            "max_num_partial_prefills": rng.randint(1, 3),
            "watermark": rng.choice((0.0, 0.1, 0.4)),
            "scheduling_policy": policy,
            "priority_ageing_seconds": 5.0,
        }
        self.is_caching = rng.random() < 0.8
        self.core: Core = make_core(
            block_size=self.block_size,
            num_blocks=-(-rng.choice((16, 24, 40)) // self.block_size),
            max_drafts=self.max_drafts,
            enable_prefix_caching=self.is_caching,
            seed=seed,
            accuracy=rng.choice((0.0, 0.5, 0.9, 1.0)),
            num_lookahead_tokens=self.max_drafts if writes_kv else 0,
            executor_class=executor_class,
            **core,
            **self.config,
        )
        self.core.executor.row_error_rate = rng.choice((0.0, 0.0, 0.01))
        self.core.executor.launch_error_rate = rng.choice((0.0, 0.0, 0.01))
        self.core.executor.settle_error_rate = rng.choice((0.0, 0.0, 0.01))
        self.scheduler, self.pool = self.core.scheduler, self.core.pool
        self.live: dict[str, list[Expected]] = {}
        self.launched: deque[tuple[StepPlan, Any]] = deque()
        self.first: Sequence | None = None
        self.num_stalled = 0
        self.num_waited = 0
        self.num_requests = 0
        self.num_finished = 0
        self.num_rows = 0

    def run(self, num_steps: int) -> None:
        """Random traffic for some steps, then no more arrivals until everything has ended."""
        for _ in range(num_steps):
            self._traffic()
            self._step()
        for _ in range(MAX_DRAIN_STEPS):
            if not self.scheduler.has_requests:
                break
            self._step()
        assert not self.scheduler.has_requests, "the rest never ends"
        assert self.live == {}
        assert not self.launched
        assert self.pool.num_free == self.pool.num_usable
        self.scheduler.check_integrity()

    # -- callers ---------------------------------------------------------------------------

    def _traffic(self) -> None:
        self.core.clock.now_s += self.rng.choice((0.0, 0.1, 1.0))
        while self.rng.random() < 0.3 and len(self.live) < 12:
            self._arrive()
        if self.live and self.rng.random() < 0.05:
            request_id = self.rng.choice(list(self.live))
            choices = self.live[request_id]
            if self.rng.random() < 0.5:
                self.scheduler.abort(request_id)
                del self.live[request_id]
            else:
                index = self.rng.randrange(len(choices))
                self.scheduler.abort(request_id, index)
                self._end_choice(choices[index])

    def _arrive(self) -> None:
        rng, now_s = self.rng, self.core.clock.now_s
        longest = self.pool.num_usable * self.block_size
        num_prompt = rng.randint(1, longest - 1)
        family = rng.randrange(3)  # prompts of a family share what they have in common
        prompt = [(family * 7 + i) % VOCAB_SIZE for i in range(num_prompt)]
        if rng.random() < 0.3:
            prompt[rng.randrange(num_prompt)] = rng.randrange(VOCAB_SIZE)
        max_tokens = rng.randint(1, min(20, longest - num_prompt))
        self.num_requests += 1
        request = make_request(
            f"r{self.num_requests}",
            tuple(prompt),
            stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice((0, 1, 4)))),
            priority=rng.randint(-2, 2),
            arrival_s=now_s - rng.choice((0.0, 0.0, 2.0)),
            deadline_s=rng.choice((None, None, now_s, now_s + rng.uniform(0, 30))),
            cache_salt=rng.choice(("", "", "salt")),
            seed=rng.randrange(5),
            n=rng.choice((1, 1, 2, 4)),
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens),
            logprobs=rng.choice((None, 0)),
            prompt_logprobs=rng.choice((None, None, 0)),
        )
        self._submit(request)

    def _submit(self, request: Request) -> None:
        self.live[request.request_id] = [Expected(request, index) for index in range(request.sampling.n)]
        self.scheduler.add(request)

    # -- the engine's part -----------------------------------------------------------------

    def _step(self) -> None:
        in_flight = {s.seq_id: s.epoch for s in self.scheduler._batch.sequences if s.in_flight}
        first = self._first()
        plan = self.scheduler.schedule()
        self._check_in_flight(in_flight)
        must_settle = plan is None
        if plan is not None:
            self._check_plan(plan)
            handle = self._launch(plan)
            must_settle = isinstance(handle, InjectedError)
            self.launched.append((plan, handle))
        else:
            is_awaiting = self._begin_transfers()
            is_moving = self.launched or is_awaiting or not self.scheduler.has_requests
            assert is_moving, "nothing runs and nothing is planned"
        self._check_progress(first, plan)
        while self.launched and (must_settle or len(self.launched) > self.depth):
            self._settle()
            must_settle &= plan is not None
        self._check_blocks()
        for output in self.scheduler.take_outputs():
            self._deliver(output)

    def _launch(self, plan: StepPlan) -> Any:
        try:
            return self.core.executor.launch(plan)
        except InjectedError as error:
            return error

    def _settle(self) -> None:
        plan, handle = self.launched.popleft()
        try:
            if isinstance(handle, InjectedError):
                raise handle
            result = self.core.executor.settle(handle)
        except InjectedError:
            result = StepResult(tuple(RowResult(row.seq_id, row.epoch, error="failed") for row in plan.rows))
        self.scheduler.update(result)

    def _deliver(self, output: SequenceOutput) -> None:
        assert output.request_id in self.live, f"{output.request_id} is over"
        choices = self.live[output.request_id]
        choice = choices[output.choice]
        choice.take(output)
        if output.failure is not None:
            if output.failure is Failure.EXPIRED:
                deadline_s = choice.request.deadline_s
                assert deadline_s is not None
                assert deadline_s <= output.settled_s
            del self.live[output.request_id]
        elif output.finish_reason is not None:
            self.num_finished += 1
            self._end_choice(choice)

    def _end_choice(self, choice: Expected) -> None:
        choice.is_over = True
        choices = self.live[choice.request.request_id]
        if all(sibling.is_over for sibling in choices):
            del self.live[choice.request.request_id]

    def _begin_transfers(self) -> bool:
        """Begin them without a step. Returns: whether something will come that is waited for."""
        return False

    # -- rules -----------------------------------------------------------------------------

    def _first(self) -> Sequence | None:
        """The sequence that goes before all others."""
        return min(self.scheduler._live.by_id.values(), key=lambda sequence: sequence.order, default=None)

    def _check_progress(self, first: Sequence | None, plan: StepPlan | None) -> None:
        """The first sequence advances: soon if it has a seat, else once those that have one end."""
        rows = () if plan is None else plan.rows
        self.num_rows += len(rows)
        if first is not self.first or any(row.seq_id == first.seq_id for row in rows if first is not None):
            self.first = first
            self.num_stalled = self.num_waited = 0
        elif first is None or first.is_finished:
            pass
        elif first.slot is None:
            self.num_waited += 1
            assert self.num_waited <= self.max_waiting_steps, f"sequence {first.seq_id} is never started"
        else:
            self.num_stalled += 1
            assert self.num_stalled <= self.max_stalled_steps, f"sequence {first.seq_id} starves"

    def _check_in_flight(self, in_flight: dict[int, int]) -> None:
        for sequence in self.scheduler._live.by_id.values():
            if sequence.seq_id in in_flight:
                assert sequence.epoch == in_flight[sequence.seq_id], "a sequence in flight was preempted"
                assert sequence.slot is not None

    def _check_plan(self, plan: StepPlan) -> None:
        config, now_s = self.config, self.core.clock.now_s
        assert plan.rows
        assert sum(row.num_query for row in plan.rows) <= config["max_num_batched_tokens"]
        assert sum(not row.is_sampling for row in plan.rows) <= config["max_num_partial_prefills"]
        slots = [row.slot for row in plan.rows]
        assert len(set(slots)) == len(slots) <= config["max_num_seqs"]
        assert {start.slot for start in plan.starts} <= set(slots)
        threshold = config["long_prefill_token_threshold"]
        for row in plan.rows:
            assert 0 <= row.num_drafts <= self.max_drafts
            assert row.num_query >= 1 + row.num_drafts
            assert not threshold or row.num_query - row.num_drafts <= threshold
            request = self.scheduler._live.by_id[row.seq_id].request
            assert request.deadline_s is None or request.deadline_s > now_s, "an expired request runs"
        seq_ids = {row.slot: row.seq_id for row in plan.rows}
        for start in plan.starts:
            assert start.num_computed < len(start.token_ids)
            choice = self.live[start.request.request_id][self.scheduler._live.by_id[seq_ids[start.slot]].choice]
            if choice.num_cached is None:
                choice.num_cached = start.num_computed
                if choice.index == 0 and not self._may_have_hits(start.request):
                    assert start.num_computed == 0

    def _may_have_hits(self, request: Request) -> bool:
        return self.is_caching and request.sampling.prompt_logprobs is None

    def _held_by_others(self) -> Counter[int]:
        """Blocks that others than sequences hold, and how often."""
        return Counter()

    def _check_blocks(self) -> None:
        self.scheduler.check_integrity()
        batch = self.scheduler._batch
        seated = [*batch.sequences, *batch.draining]
        slots = [sequence.slot for sequence in seated]
        assert len(set(slots)) == len(slots) <= self.config["max_num_seqs"]
        own = Counter(block_id for sequence in seated for block_id in sequence.block_ids)
        holders = own + self._held_by_others()
        assert all(self.pool._references[block_id] == count for block_id, count in holders.items())
        assert len(holders) == self.pool.num_usable - self.pool.num_free
        for sequence in seated:
            assert len(set(sequence.block_ids)) == len(sequence.block_ids)
            first_writable = min(sequence.num_computed, len(sequence.token_ids)) // self.block_size
            for block_id in sequence.block_ids[first_writable:]:
                assert holders[block_id] == 1, f"block {block_id} has {holders[block_id]} writers"
                assert self.pool._hash_of[block_id] is None, f"block {block_id} is published and written"
