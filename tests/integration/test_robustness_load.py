"""A reader that does not read, and many that do."""

import asyncio
import random
import time
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from clients.aio import AsyncClient
from clients.outputs import Choice, Delta, OutputBuilder
from clients.requests import GenerateOptions, generate_request
from protos.outrider.v1.inference_pb2_grpc import InferenceStub
from tests.fakes.eventually import eventually
from tests.integration.real_server import BLOCK_SIZE, NGRAM, RealServer, real_server
from tests.tiny_model import build_tiny_model

MAX_LEN = 4500
NUM_LOGPROBS = 40
NARROW = [("grpc.http2.bdp_probe", 0)]
"""A connection that holds 64 KiB that nobody has read, as it does at first; by default it learns to hold megabytes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), max_position=MAX_LEN)


@asynccontextmanager
async def running(model: Path, *, num_tokens: int, **settings: Any) -> AsyncIterator[RealServer]:
    async with real_server(model, num_blocks=num_tokens // BLOCK_SIZE, speculative_config=NGRAM, **settings) as server:
        yield server


class Reader:
    """Generates and reads, again and again. Attributes: answers: that have come."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, ...]] = []

    async def read_until(self, is_over: asyncio.Event, client: AsyncClient) -> None:
        while not is_over.is_set():
            output = await client.generate("The brown dog", max_tokens=50, ignore_eos=True, temperature=0)
            self.answers.append(output.choices[0].token_ids)


async def read_late(
    server: RealServer, options: GenerateOptions, others: Sequence[Reader]
) -> tuple[Choice, list[Delta], int]:
    """Call, read nothing until everything was generated and the others have had answers since, then all of it.

    Returns: the choice, its deltas, and the bytes that Python holds more than before while all of it waits.
    """
    async with grpc.aio.insecure_channel(server.front.target, options=NARROW) as channel:
        tracemalloc.start()
        call = InferenceStub(channel).Generate(generate_request(None, {**options, "request_id": "late"}))
        await eventually(lambda: server.is_live("late"))
        await eventually(lambda: not server.is_live("late"), timeout_s=500)
        nbytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        nums_answers = [len(other.answers) for other in others]
        await eventually(lambda: all(len(other.answers) > num for other, num in zip(others, nums_answers, strict=True)))
        builder = OutputBuilder()
        events = [builder.add(message) async for message in call]
        return builder.output().choices[0], [event for event in events if isinstance(event, Delta)], nbytes


async def nobody_waits_for_a_late_reader(model: Path, num_tokens: int) -> None:
    options: GenerateOptions = {"token_ids": [70], "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0}
    async with running(model, num_tokens=2 * MAX_LEN) as server:
        expected = (await server.client.generate(**options)).choices[0]
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            others = [Reader() for _ in range(2)]
            for other in others:
                tasks.create_task(other.read_until(is_over, server.client))
            choice, deltas, nbytes = await read_late(server, {**options, "logprobs": NUM_LOGPROBS}, others)
            is_over.set()
        assert (choice.text, choice.token_ids) == (expected.text, expected.token_ids)
        assert "".join(delta.text for delta in deltas) == choice.text
        assert [position.chosen.token_id for position in choice.logprobs] == list(choice.token_ids)
        assert len(deltas) < num_tokens / 2, "what waited came in few large pieces"
        # Its own output and no more: an alternative is one small object. The rest is what two other streams take.
        assert nbytes < num_tokens * NUM_LOGPROBS * 250 + (4 << 20)
        assert len({answer for other in others for answer in other.answers}) == 1
        await server.settle()


async def test_nobody_waits_for_a_late_reader(model: Path) -> None:
    await nobody_waits_for_a_late_reader(model, 300)


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_nobody_waits_for_a_reader_late_by_four_thousand_tokens(model: Path) -> None:
    await nobody_waits_for_a_late_reader(model, 4000)


def any_options(rng: random.Random) -> GenerateOptions:
    """A request of any kind."""
    given: GenerateOptions = {
        "token_ids": [rng.randint(3, 299) for _ in range(rng.choice((1, 20, 100, 300)))],
        "max_tokens": rng.randint(1, 40),
        "temperature": rng.choice((0.0, 0.7, 1.5)),
        "top_p": rng.choice((0.5, 1.0)),
        "top_k": rng.choice((-1, 5)),
        "min_p": rng.choice((0.0, 0.1)),
        "repetition_penalty": rng.choice((1.0, 1.3)),
        "presence_penalty": rng.choice((0.0, 1.0)),
        "n": rng.choice((1, 1, 1, 3)),
        "ignore_eos": rng.random() < 0.5,
        "priority": rng.randint(-2, 2),
        "speculation": rng.random() < 0.7,
    }
    for name, value in (
        ("seed", rng.randint(0, 9)),
        ("logprobs", rng.randint(0, 5)),
        ("prompt_logprobs", 1),
        ("stop_token_ids", [rng.randint(0, 299)]),
        ("logit_bias", {rng.randint(0, 299): 5.0}),
        ("bad_words", ["dog", "brown fox"]),
        ("cache_salt", "mine"),
    ):
        if rng.random() < 0.25:
            given[name] = value  # type: ignore[literal-required]
    return given


async def many_at_once(model: Path, num_callers: int, seconds: float, **settings: object) -> None:
    rng = random.Random(num_callers)
    num_prompt = num_generated = num_calls = 0

    async def call(client: AsyncClient, end_s: float) -> None:
        nonlocal num_prompt, num_generated, num_calls
        is_first = True
        while is_first or time.perf_counter() < end_s:
            is_first = False
            options = any_options(rng)
            output = await client.generate(**options)
            assert len(output.choices) == options["n"]
            for choice in output.choices:
                usage = choice.finished.usage
                assert usage.completion_tokens == len(choice.token_ids)
                num_prompt += usage.prompt_tokens
                num_generated += usage.completion_tokens
            num_calls += 1

    async with running(model, num_tokens=1024, max_num_batched_tokens=256, **settings) as server:
        end_s = time.perf_counter() + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_callers):
                tasks.create_task(call(server.client, end_s))
        await server.settle()
        stats = await server.stats()
        assert num_calls >= num_callers
        assert stats.generation_tokens == num_generated
        assert stats.prompt_tokens == num_prompt
        assert stats.num_preemptions > 0, "the pool was too small for all of them"
        calls = server.front.calls()
        assert [call.status for call in calls] == ["OK"] * num_calls
        assert sum(call.num_completion_tokens for call in calls) == num_generated


async def test_many_at_once(model: Path) -> None:
    await many_at_once(model, num_callers=64, seconds=2, pipeline_depth=1)


@pytest.mark.full
@pytest.mark.parametrize("pipeline_depth", [0, 1])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
async def test_many_for_longer(model: Path, pipeline_depth: int, policy: str) -> None:
    await many_at_once(model, 64, 15, pipeline_depth=pipeline_depth, scheduling_policy=policy)
