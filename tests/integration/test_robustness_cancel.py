"""Requests are left at random, in every phase and in every way; nothing of them may stay."""

import asyncio
import enum
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from clients.aio import AsyncClient, AsyncGeneration
from clients.errors import CancelledCallError, DeadlineExceededError
from clients.outputs import Delta, Started
from clients.requests import GenerateOptions
from tests.fakes.eventually import eventually
from tests.fakes.front import NO_RETRY
from tests.integration.real_server import BLOCK_SIZE, NGRAM, SLOW, RealServer, real_server
from tests.tiny_model import build_tiny_model

NUM_BLOCKS = 64
CHUNK = 64
WIDE_PROMPT, WIDE_OUTPUT = 900, 73
"""A request for 61 of the 64 blocks."""


class Phase(enum.Enum):
    """Where a request is when it is left."""

    QUEUED = enum.auto()
    TOKENISING = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    VERIFYING = enum.auto()
    SEVERAL_CHOICES = enum.auto()


class Way(enum.Enum):
    """How it is left."""

    CANCEL = enum.auto()
    CANCEL_TASK = enum.auto()
    ABORT = enum.auto()
    CLOSE_CHANNEL = enum.auto()
    DEADLINE = enum.auto()
    NEVER_READ = enum.auto()


def options(phase: Phase, number: int, rng: random.Random) -> GenerateOptions:
    """A request that will be in this phase, and would go on for long."""
    given: GenerateOptions = {
        "ignore_eos": True,
        "request_id": f"{phase.name}-{number}",
        "priority": rng.randint(-1, 1),
    }
    match phase:
        case Phase.PREFILLING:  # a prompt of five chunks that nobody has cached
            given |= {"token_ids": [rng.randint(3, 299) for _ in range(5 * CHUNK - 7)]}
        case Phase.VERIFYING:
            given |= {"token_ids": [70, 71, 72, 73] * 12, "allowed_token_ids": [70, 71, 72, 73], "temperature": 0.2}
        case Phase.SEVERAL_CHOICES:
            given |= {"n": 4, "token_ids": [rng.randint(3, 299) for _ in range(40)]}
        case _:
            given |= {"token_ids": [rng.randint(3, 299) for _ in range(rng.randint(1, 90))]}
    return given


class Caller:
    """One request, from its call to being left."""

    def __init__(self, server: RealServer, phase: Phase, way: Way, number: int, rng: random.Random) -> None:
        self.server = server
        self.phase = phase
        self.way = way
        self.request_id = f"{phase.name}-{number}"
        self.own_client = AsyncClient(server.front.target, retry=NO_RETRY) if way is Way.CLOSE_CHANNEL else None
        timeout_s = rng.uniform(0.001, 0.3) if way is Way.DEADLINE else None
        self.num_deltas = rng.randint(1, 6)
        self.slow_text = f"{SLOW}{number}"
        client = self.own_client or server.client
        given = options(phase, number, rng)
        if phase is Phase.TOKENISING:
            del given["token_ids"]
            self.generation = client.generate(self.slow_text, timeout_s=timeout_s, **given)
        else:
            self.generation = client.generate(timeout_s=timeout_s, **given)
        self.is_there = asyncio.Event()
        self.joined: dict[int, tuple[str, tuple[int, ...]]] = {}

    async def run(self) -> None:
        """Call, come to the phase, leave, and check how the call ended."""
        reading = asyncio.create_task(self._read())
        await asyncio.sleep(0)  # A task that was cancelled before it began would not end the call.
        if self.phase is Phase.QUEUED:
            self.is_there.set()
        elif self.phase is Phase.TOKENISING and self.way is not Way.DEADLINE:
            await eventually(lambda: self.slow_text in self.server.tokenizer.begun or reading.done())
            self.is_there.set()
        if self.way is not Way.DEADLINE:
            await self.is_there.wait()
        match self.way:
            case Way.CANCEL:
                self.generation.cancel()
            case Way.CANCEL_TASK:
                reading.cancel()
            case Way.ABORT:
                await self.server.client.abort(self.request_id)
            case Way.CLOSE_CHANNEL:
                assert self.own_client is not None
                await self.own_client.close()
        await self._check(reading)

    async def _read(self) -> None:
        num_deltas = 0
        async for event in self.generation.events():
            if isinstance(event, Started) and self.phase is Phase.PREFILLING:
                self.is_there.set()
            if isinstance(event, Delta):
                num_deltas += 1
                text, ids = self.joined.get(event.index, ("", ()))
                self.joined[event.index] = (text + event.text, ids + event.token_ids)
                if num_deltas == self.num_deltas:
                    self.is_there.set()

    async def _check(self, reading: "asyncio.Task[None]") -> None:
        match self.way:
            case Way.CANCEL | Way.CLOSE_CHANNEL:
                with pytest.raises(CancelledCallError):
                    await reading
            case Way.CANCEL_TASK:
                with pytest.raises(asyncio.CancelledError):
                    await reading
            case Way.DEADLINE:
                with pytest.raises(DeadlineExceededError):
                    await reading
            case Way.ABORT if self.phase is Phase.QUEUED:
                # The abort may have overtaken the call: then nobody is there to be ended.
                if not reading.done():
                    self.generation.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            case Way.ABORT:
                await reading
                self._check_aborted(self.generation)

    def _check_aborted(self, generation: AsyncGeneration) -> None:
        assert {end.finish_reason for end in generation.finished.values()} == {"abort"}
        for choice in generation.output.choices:
            text, ids = self.joined.get(choice.index, ("", ()))
            assert (choice.text, choice.token_ids) == (text, ids)
            assert choice.finished.usage.completion_tokens == len(ids)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), max_position=NUM_BLOCKS * BLOCK_SIZE)


@asynccontextmanager
async def running(model: Path, pipeline_depth: int) -> AsyncIterator[RealServer]:
    async with real_server(
        model,
        num_blocks=NUM_BLOCKS,
        pipeline_depth=pipeline_depth,
        max_num_seqs=6,
        max_num_batched_tokens=CHUNK,
        speculative_config=NGRAM,
    ) as server:
        yield server


async def wide_request(client: AsyncClient, salt: str) -> tuple[int, ...]:
    """What a request for 95% of the pool yields, nothing of it taken from the cache."""
    prompt = [3 + (i * i) % 290 for i in range(WIDE_PROMPT)]
    output = await client.generate(
        token_ids=prompt, max_tokens=WIDE_OUTPUT, ignore_eos=True, temperature=0, cache_salt=salt
    )
    assert output.started is not None
    assert output.started.cached_tokens == 0
    return output.choices[0].token_ids


async def killed_client(server: RealServer) -> None:
    """A client process is killed with its streams open."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.integration.doomed_client", server.front.target, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    process.kill()
    await process.wait()


async def leave_at_random(server: RealServer, num_requests: int, seed: int) -> None:
    rng = random.Random(seed)
    everything = [(phase, way) for phase in Phase for way in Way]
    plan = (everything * (num_requests // len(everything) + 1))[:num_requests]
    rng.shuffle(plan)
    limit = asyncio.Semaphore(24)
    never_read: list[AsyncGeneration] = []

    async def call(number: int, phase: Phase, way: Way) -> None:
        async with limit:
            if way is Way.NEVER_READ:
                given: GenerateOptions = {**options(phase, number, rng), "max_tokens": rng.randint(1, 40)}
                never_read.append(server.client.generate(**given))
            else:
                await Caller(server, phase, way, number, rng).run()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(killed_client(server))
        for number, (phase, way) in enumerate(plan):
            tasks.create_task(call(number, phase, way))
    await server.settle()  # with the streams that nobody reads still open
    for generation in never_read:
        generation.cancel()
    await server.settle()


async def everything_comes_back(server: RealServer, num_requests: int) -> None:
    expected = await wide_request(server.client, "before")
    assert len(expected) == WIDE_OUTPUT
    await leave_at_random(server, num_requests, seed=num_requests)
    assert sum((await server.stats()).draft_tokens_per_position) > 0, "drafts were being verified"
    assert await wide_request(server.client, "after") == expected


async def test_left_at_random_everything_comes_back(model: Path) -> None:
    async with running(model, pipeline_depth=1) as server:
        await everything_comes_back(server, len(Phase) * len(Way))


@pytest.mark.full
@pytest.mark.parametrize("pipeline_depth", [0, 1])
async def test_left_two_hundred_times_everything_comes_back(model: Path, pipeline_depth: int) -> None:
    async with running(model, pipeline_depth) as server:
        await everything_comes_back(server, 200)
