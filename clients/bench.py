"""Drives a server with load and measures it from the outside."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, Unpack

from clients.async_stream import AsyncStream
from clients.errors import OutriderClientError
from clients.measurements import Goodput, Measurements, RequestTimer
from clients.requests import GenerateOptions
from clients.workload import Prompt, poisson_arrivals

_clock = time.perf_counter


class Generating(Protocol):
    """A client of one server, or of several. It must not retry, or its pauses are measured as the server's."""

    def generate(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """Begin a generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """How requests are sent.

    Attributes:
        request_rate: per second on average, sent whether or not earlier ones have ended
            (open loop); infinite sends all at once.
        max_concurrency: most calls at a time. With an infinite rate the next is sent when
            one ends (closed loop); with a finite one, requests wait here and their wait counts.
        num_warmups: requests before the measured ones; not counted.
        timeout_s: deadline of each call; None has none.
    """

    num_prompts: int
    request_rate: float = math.inf
    max_concurrency: int | None = None
    num_warmups: int = 0
    temperature: float | None = None
    ignore_eos: bool = False
    seed: int = 0
    timeout_s: float | None = None
    goodput: Goodput | None = None

    @property
    def is_closed_loop(self) -> bool:
        """Whether the server's answers pace the requests."""
        return math.isinf(self.request_rate) and self.max_concurrency is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """What a run measured, and what measuring cost.

    Attributes:
        duration_s: from the first scheduled send to the last answer.
        client_cpu_s: what this process itself computed meanwhile; close to `duration_s`, it measured itself.
    """

    measurements: Measurements
    duration_s: float
    client_cpu_s: float

    def report(self) -> dict[str, object]:
        """The result as JSON values."""
        return {
            **self.measurements.report(self.duration_s),
            "client_cpu": {"cpu_s": self.client_cpu_s, "share_of_one_core": self.client_cpu_s / self.duration_s},
        }


async def run_load(
    client: Generating, prompts: Iterator[Prompt], load: Load, on_done: Callable[[], None] = lambda: None
) -> BenchResult:
    """Send the warm-up requests, then the measured ones.

    Args:
        prompts: yields at least num_warmups + num_prompts.
        on_done: called after each measured request, whatever its outcome.
    """
    if load.num_warmups:
        warmups = islice(prompts, load.num_warmups)
        await _closed_loop(Sender(client, load, Measurements()), warmups, load.max_concurrency or 1)
    measurements = Measurements(load.goodput)
    sender = Sender(client, load, measurements, on_done)
    measured = islice(prompts, load.num_prompts)
    cpu_before_s, start_s = time.process_time(), _clock()
    if load.is_closed_loop:
        assert load.max_concurrency is not None
        await _closed_loop(sender, measured, load.max_concurrency)
    else:
        await _open_loop(sender, measured, load, start_s)
    return BenchResult(
        measurements=measurements,
        duration_s=_clock() - start_s,
        client_cpu_s=time.process_time() - cpu_before_s,
    )


async def _closed_loop(sender: "Sender", prompts: Iterator[Prompt], num_workers: int) -> None:
    async def work() -> None:
        for prompt in prompts:  # shared: each worker takes the next
            await sender.send(prompt, _clock())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_workers):
            tasks.create_task(work())


async def _open_loop(sender: "Sender", prompts: Iterator[Prompt], load: Load, start_s: float) -> None:
    seats = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency is not None else nullcontext()

    async def send(prompt: Prompt, scheduled_s: float) -> None:
        async with seats:
            await sender.send(prompt, scheduled_s)

    async with asyncio.TaskGroup() as tasks:
        arrivals = poisson_arrivals(load.request_rate, seed=load.seed)
        for prompt, arrival_s in zip(prompts, arrivals, strict=False):
            scheduled_s = start_s + arrival_s
            await asyncio.sleep(max(0.0, scheduled_s - _clock()))
            tasks.create_task(send(prompt, scheduled_s))


class Sender:
    """Sends one prompt and records what became of it."""

    def __init__(
        self,
        client: Generating,
        load: Load,
        measurements: Measurements,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._load = load
        self._measurements = measurements
        self._on_done = on_done

    async def send(self, prompt: Prompt, scheduled_s: float) -> None:
        """Stream one generation to its end; an error is counted by its status."""
        try:
            await self._stream(prompt, RequestTimer(scheduled_s))
        except OutriderClientError as error:
            self._measurements.failures[error.code.name] += 1
        self._on_done()

    async def _stream(self, prompt: Prompt, timer: RequestTimer) -> None:
        load, measurements = self._load, self._measurements
        measurements.send_delay.add(_clock() - timer.scheduled_s)
        generation = self._client.generate(
            prompt.text,
            token_ids=prompt.token_ids,
            max_tokens=prompt.max_tokens,
            temperature=load.temperature,
            ignore_eos=load.ignore_eos,
            timeout_s=load.timeout_s,
        )
        async with aclosing(generation):
            async for delta in generation:
                num_tokens = len(delta.token_ids)
                if num_tokens:
                    gap_s = timer.message(num_tokens, _clock())
                    if gap_s is not None:
                        measurements.record_gap(gap_s, num_tokens, is_first=timer.num_gaps == 1)
        finished = generation.finished.get(0)
        if finished is None:
            measurements.failures["NO_FINISHED_MESSAGE"] += 1
        else:
            measurements.record_success(timer, finished, _clock())
