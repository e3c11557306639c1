"""The real engine on a real model, for tests that look at tokens; no network in between."""

import asyncio
import os
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from proposers.base import HostProposer, Proposer
from server.compose import Core, build_core
from server.composition.proposers import build_proposers
from server.config import Config
from server.engine.protocol import (
    Delta,
    EngineStatistics,
    Finished,
    PositionLogprobs,
    PromptLogprobs,
    Started,
    StreamEvent,
)
from server.errors import OutriderError
from server.preprocess import TextPrompt, TokensPrompt
from server.request import Request, SamplingParams, SpeculationOptions
from server.speculation_state import SpeculationChange
from tests.fakes.device import few_batch_sizes
from tests.fakes.eventually import eventually

_Result = TypeVar("_Result")
IS_EAGER = "OUTRIDER_TEST_EAGER" in os.environ
"""Whether engines run with --enforce-eager unless a test says otherwise; read before settings are cleared."""
Prompt = str | Sequence[int]


@dataclass
class Answer:
    """Everything one choice brought, as a caller would put it together."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def end(self) -> Finished:
        """The closing event, which must have come."""
        assert self.finished is not None
        return self.finished


@dataclass
class Outcome:
    """Everything one request brought: its choices, or the error it ended with."""

    choices: list[Answer]
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    error: OutriderError | None = None

    def take_in(self, event: StreamEvent) -> None:
        match event:
            case Started():
                self.num_cached_tokens = event.num_cached_tokens
            case PromptLogprobs():
                self.prompt_logprobs += event.positions
            case Delta():
                choice = self.choices[event.index]
                choice.deltas.append(event)
                choice.token_ids += event.token_ids
                choice.text += event.text
                choice.logprobs += event.logprobs
            case Finished():
                self.choices[event.index].finished = event

    @property
    def only(self) -> Answer:
        """The one choice of a request that did not fail."""
        if self.error is not None:
            raise self.error
        assert len(self.choices) == 1
        return self.choices[0]


class EngineUnderTest:
    """An engine with its event loop in a thread of its own, so that tests and fixtures stay synchronous."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._next_id = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-loop")
        self._thread.start()
        self._run(core.engine.start())

    def close(self) -> None:
        self._run(self.core.engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        num_drafts: int | None = None,
        arrivals: random.Random | None = None,
        on_event: Callable[[], Awaitable[object]] | None = None,
    ) -> list[Outcome]:
        """Answers in the prompts' order.

        Args:
            num_drafts: as a request asks for it; None leaves it to the engine.
            arrivals: requests come while others run, at random; None sends all at once.
            on_event: awaited after every event, while its request goes on.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        requests = [self._request(prompt, params, num_drafts) for prompt, params in zip(prompts, each, strict=True)]
        return self._run(self._generate(requests, arrivals, on_event))

    def set_speculation(self, change: SpeculationChange) -> None:
        """Change it, and wait until the change holds."""
        self._run(self.core.engine.set_speculation(change))

    def statistics(self) -> EngineStatistics:
        """The engine's counters."""
        return self.core.engine.statistics()

    def settle(self) -> None:
        """Wait until nobody but the cache has any block, without giving the engine anything to do."""
        self._run(eventually(self._is_quiet))
        self.core.scheduler.check_integrity()

    def _is_quiet(self) -> bool:
        found = self.statistics()
        return found.kv_blocks_free == found.kv_blocks_total and not found.num_held_blocks

    def abort(self, request_id: str) -> None:
        """End a request, if it is live."""

        async def abort() -> None:
            self.core.engine.abort(request_id)

        self._run(abort())

    def _request(self, prompt: Prompt, sampling: SamplingParams, num_drafts: int | None) -> Request:
        self._next_id += 1
        return self.core.preprocessor.build(
            TextPrompt(prompt) if isinstance(prompt, str) else TokensPrompt(prompt),
            sampling,
            request_id=f"request-{self._next_id}",
            speculation=SpeculationOptions(num_speculative_tokens=num_drafts),
        )

    async def _generate(
        self,
        requests: Sequence[Request],
        arrivals: random.Random | None,
        on_event: Callable[[], Awaitable[object]] | None,
    ) -> list[Outcome]:
        engine = self.core.engine
        outcomes = [Outcome([Answer() for _ in range(request.sampling.n)]) for request in requests]
        waiting = list(range(len(requests)))
        tasks: list[asyncio.Task[None]] = []

        def start_next() -> None:
            tasks.append(group.create_task(answer(waiting.pop(0))))

        async def answer(index: int) -> None:
            stream = engine.open(requests[index].request_id)
            engine.submit(stream, requests[index])
            try:
                async for event in stream:
                    outcomes[index].take_in(event)
                    if on_event is not None:
                        await on_event()
                    if waiting and arrivals is not None and arrivals.random() < 0.3:
                        start_next()
            except OutriderError as error:
                outcomes[index].error = error
            if waiting:
                start_next()

        async with asyncio.TaskGroup() as group:
            for _ in range(1 if arrivals is not None else len(requests)):
                start_next()
        return outcomes

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


@contextmanager
def engine_on(
    model: Path | str,
    device: str,
    *,
    proposer: Proposer | HostProposer | None = None,
    num_threads: int = 1,
    **settings: object,
) -> Iterator[EngineUnderTest]:
    """An engine in float32 without speculation, unless `settings` say otherwise.

    Args:
        proposer: takes the place of the configured one.
        num_threads: of torch; tiny models lose far more to waiting for threads than they gain.
    """
    defaults: dict[str, object] = {
        "device": device,
        "dtype": "float32",
        "enforce_eager": IS_EAGER,
        "compile": "none",
        "kv_cache_memory_bytes": 4 << 20,
        "block_size": 16,
        "stream_interval": 1,  # events come as steps do, whatever the clock says
        "speculative_config": ngram(proposer.num_speculative_tokens) if proposer else None,
    }
    values = {**defaults, **settings}
    values["speculative_config"] = _at_fixed_width(values["speculative_config"])
    config = Config.from_kwargs(model=str(model), **values)
    build = (lambda *_: [proposer]) if proposer else build_proposers
    with (
        patch("server.compose.build_proposers", build),
        patch("server.composition.target.cpu_count", lambda: num_threads),
        patch("server.compose.batch_sizes", few_batch_sizes),
    ):
        engine = EngineUnderTest(build_core(config))
    try:
        yield engine
    finally:
        engine.close()


def _at_fixed_width(speculative: object) -> object:
    """Without a policy that turns drafts off where they do not pay, as for tiny models they hardly do."""
    if isinstance(speculative, Mapping):
        return {"policy": "fixed", **speculative}
    if isinstance(speculative, list) and not any("policy" in member for member in speculative):
        return [{"policy": "fixed", **speculative[0]}, *speculative[1:]]
    return speculative


def ngram(k: int, shortest: int = 1, longest: int = 3) -> dict[str, object]:
    """The speculative_config of n-gram lookup."""
    return {
        "method": "ngram",
        "num_speculative_tokens": k,
        "prompt_lookup_min": shortest,
        "prompt_lookup_max": longest,
        "policy": "fixed",
    }
