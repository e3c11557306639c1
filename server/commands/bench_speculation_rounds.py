"""Rounds of `outrider bench speculation`: a batch goes through the engine under one choice of the number of drafts."""

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from clients.workload import Prompt
from server.commands.bench_engine_rounds import Round, run_to_end
from server.commands.bench_speculation_steps import StepLog
from server.compose import Core
from server.engine.protocol import EngineStatistics
from server.errors import OutriderError
from server.preprocess import TokensPrompt
from server.request import Request, SamplingParams
from server.scheduler.draft_policy import DraftPolicy, FixedPolicy
from server.speculative_config import PolicyConfig


@dataclass(frozen=True, slots=True)
class Candidate:
    """How many drafts a step verifies: always k, or as many as the policy auto finds best."""

    k: int | None

    @property
    def name(self) -> str:
        """As tables and reports have it."""
        return "auto" if self.k is None else str(self.k)


AUTO, OFF = Candidate(None), Candidate(0)


def candidates(numbers: Sequence[int], max_drafts: int) -> list[Candidate]:
    """Off, the numbers that the proposer can make, its own in place of those beyond it, and auto."""
    return [*map(Candidate, sorted({0, *(min(k, max_drafts) for k in numbers)})), AUTO]


@dataclass(frozen=True, slots=True)
class Measured:
    """A round, and what the engine counted meanwhile.

    Attributes:
        draft_s: spent proposing.
        num_drafts_chosen: over all of its steps, the drafts that each was to verify at most.
    """

    round: Round
    draft_s: float
    num_drafts_chosen: int
    num_steps: int


class Bench:
    """Sends batches to a started engine; owned by the event loop.

    Each batch has a salt of its own: nothing is found in the prefix cache, and no proposer learns from the same
    prompts' outputs under another candidate.
    """

    def __init__(self, core: Core, temperature: float) -> None:
        """Args: core: subscribed to here, so not started yet."""
        self._core = core
        self._temperature = temperature
        self._ids = itertools.count()
        self._steps = StepLog(core.engine.now)
        core.bus.subscribe(self._steps)

    def policy(self, candidate: Candidate) -> DraftPolicy:
        """A new one, which has learned nothing."""
        if candidate.k is not None:
            return FixedPolicy(candidate.k)
        return self._core.make_policy(PolicyConfig(), self._core.engine.model_info.num_speculative_tokens)

    async def measure(self, policy: DraftPolicy, prompts: Sequence[Prompt]) -> Measured:
        """Generate for all prompts at once, to the length that each wants."""
        self._use(policy)
        before = self._core.engine.statistics()
        requests = self._requests(prompts)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run_to_end(self._core, request)) for request in requests]
        after = self._core.engine.statistics()
        return Measured(
            Round.of([task.result() for task in running]),
            draft_s=after.draft_seconds - before.draft_seconds,
            num_drafts_chosen=_num_chosen(after) - _num_chosen(before),
            num_steps=sum(after.steps_per_draft_limit) - sum(before.steps_per_draft_limit),
        )

    async def measure_phases(
        self, policy: DraftPolicy, phases: Sequence[Sequence[Prompt]], num_steps: int
    ) -> list[float]:
        """Run one batch after the other for 2 * num_steps steps each. Returns: tokens/s in the second half of each."""
        self._use(policy)
        return [await self._measure_phase(prompts, num_steps) for prompts in phases]

    async def _measure_phase(self, prompts: Sequence[Prompt], num_steps: int) -> float:
        reached = self._steps.expect(len(prompts), 2 * num_steps)
        requests = self._requests(prompts)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run_to_end(self._core, request)) for request in requests]
            waited: list[asyncio.Future[Any]] = [reached, *running]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not reached.done():
                raise OutriderError(f"a sequence ended before {2 * num_steps} steps in which all of its batch decoded")
            for request in requests:
                self._core.engine.abort(request.request_id)
        return self._steps.tokens_per_s(num_steps)

    def _use(self, policy: DraftPolicy) -> None:
        """Let it decide from the next request on."""
        self._core.steps.run_between_steps(partial(self._core.scheduler.drafts.use, policy))

    def _requests(self, prompts: Sequence[Prompt]) -> list[Request]:
        salt = f"round-{next(self._ids)}"
        requests = [self._request(prompt, f"{salt}-{i}", salt) for i, prompt in enumerate(prompts)]
        now_s = self._core.engine.now()
        return [dataclasses.replace(request, arrival_s=now_s) for request in requests]

    def _request(self, prompt: Prompt, request_id: str, salt: str) -> Request:
        assert prompt.token_ids is not None
        return self._core.preprocessor.build(
            TokensPrompt(prompt.token_ids),
            SamplingParams(temperature=self._temperature, max_tokens=prompt.max_tokens, ignore_eos=True),
            request_id=request_id,
            cache_salt=salt,
        )


def rotated(listed: Sequence[Candidate], turn: int) -> list[Candidate]:
    """The same in another order: each turn begins with another one, so that what drifts hits all alike."""
    first = turn % len(listed)
    return [*listed[first:], *listed[:first]]


def _num_chosen(statistics: EngineStatistics) -> int:
    return sum(drafts * steps for drafts, steps in enumerate(statistics.steps_per_draft_limit))
