"""A scheduler on a pool small enough to run out, and requests for it."""

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from connectors.base import ConnectorScheduler
from server.config import SchedulerConfig
from server.kv.block_pool import BlockPool
from server.plan import StepPlan
from server.request import ModelInfo, Request, SamplingParams
from server.scheduler.draft_policy import DraftPolicy
from server.scheduler.outputs import SequenceOutput
from server.scheduler.scheduler import Scheduler
from tests.fakes.executor import VOCAB_SIZE, FakeExecutor


@dataclass
class Clock:
    """A clock that the test moves."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def model_info(*, block_size: int, num_blocks: int, max_drafts: int = 0) -> ModelInfo:
    """A model whose context is as long as the whole pool of `num_blocks` usable blocks."""
    return ModelInfo(
        model="fake",
        served_model_name="fake",
        architecture="Fake",
        vocab_size=VOCAB_SIZE,
        max_model_len=block_size * num_blocks,
        max_request_len=block_size * num_blocks,
        eos_token_ids=(2,),
        generation_defaults={},
        dtype="float32",
        device="cpu",
        block_size=block_size,
        num_kv_blocks=num_blocks,
        num_speculative_tokens=max_drafts,
        fingerprint=b"fake",
    )


def make_request(
    request_id: str,
    prompt: tuple[int, ...] | range,
    *,
    stop_token_ids: tuple[int, ...] = (),
    priority: int = 0,
    arrival_s: float = 0.0,
    deadline_s: float | None = None,
    cache_salt: str = "",
    **sampling: Any,
) -> Request:
    """A request as the front would make it; seeded, so that its tokens can be foretold."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**{"seed": 0, **sampling}),
        stop_token_ids=frozenset(stop_token_ids),
        priority=priority,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        cache_salt=cache_salt,
    )


@dataclass
class Core:
    """Scheduler and fake executor, stepped by the test at pipeline depth 0."""

    scheduler: Scheduler
    executor: FakeExecutor
    pool: BlockPool
    clock: Clock
    max_num_seqs: int
    outputs: list[SequenceOutput] = field(default_factory=list)

    def step(self) -> StepPlan | None:
        """Plan, run and settle one step; its outputs are appended to `outputs`."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.scheduler.update(self.executor.settle(self.executor.launch(plan)))
        self.outputs += self.scheduler.take_outputs()
        return plan

    def run(self, max_steps: int = 1000) -> int:
        """Step until nothing is left. Returns: the number of steps."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_requests:
                return num_steps
            self.step()
        raise AssertionError(f"requests are left after {max_steps} steps")

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        """All tokens put out for a choice."""
        news = [output for output in self.outputs if (output.request_id, output.choice) == (request_id, choice)]
        return [token_id for output in news for token_id in output.token_ids]


def make_core(
    *,
    block_size: int = 4,
    num_blocks: int = 16,
    max_drafts: int = 0,
    enable_prefix_caching: bool = True,
    seed: int = 0,
    accuracy: float = 0.7,
    draft_policy: DraftPolicy | None = None,
    num_lookahead_tokens: int = 0,
    executor_class: type[FakeExecutor] = FakeExecutor,
    connector: ConnectorScheduler[Any] | None = None,
    reads_from: Collection[str] = (),
    fails_on_bad_loads: bool = False,
    **config: Any,
) -> Core:
    """A scheduler with its executor; `config` are SchedulerConfig fields."""
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "watermark": 0.0, **config}
    pool = BlockPool(num_blocks + 1)
    clock = Clock()
    scheduler_config = SchedulerConfig(**values)
    scheduler = Scheduler(
        scheduler_config,
        model_info(block_size=block_size, num_blocks=num_blocks, max_drafts=max_drafts),
        pool,
        enable_prefix_caching=enable_prefix_caching,
        clock=clock,
        draft_policy=draft_policy,
        num_lookahead_tokens=num_lookahead_tokens,
        connector=connector,
        reads_from=reads_from,
        fails_on_bad_loads=fails_on_bad_loads,
    )
    executor = executor_class(
        random.Random(seed),
        block_size=block_size,
        max_drafts=max_drafts,
        accuracy=accuracy,
        is_published=lambda block_id: pool._hash_of[block_id] is not None,
        num_lookahead_tokens=num_lookahead_tokens,
    )
    return Core(scheduler, executor, pool, clock, scheduler_config.max_num_seqs)


def queries(plan: StepPlan | None) -> list[tuple[int, int]]:
    """Sequence and number of query tokens of each row."""
    assert plan is not None
    return [(row.seq_id, row.num_query) for row in plan.rows]
