"""How a request may end other than well, and that it is the only one that ends so."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Unpack

import pytest

from clients.aio import AsyncClient, AsyncGeneration
from clients.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    UnavailableError,
)
from clients.outputs import Choice, Delta
from clients.requests import GenerateOptions
from server.engine.detokenize import IncrementalDecoder
from tests.fakes.eventually import eventually, eventually_stats
from tests.fakes.slow_steps import slow_steps
from tests.integration.real_server import BLOCK_SIZE, NGRAM, SLOW, RealServer, real_server
from tests.tiny_model import build_tiny_model

POISON, UNTOUCHED = 301, 302
NUM_BLOCKS, MAX_LEN = 40, 1000
LONG: GenerateOptions = {
    "token_ids": [70, 71, 72],
    "allowed_token_ids": range(60, 300),
    "ignore_eos": True,
    "temperature": 0.0,
    "max_tokens": 300,
}


def long(**more: Unpack[GenerateOptions]) -> GenerateOptions:
    """Options of an answer that takes a while."""
    return {**LONG, **more}


class Running:
    """A request whose first delta has arrived."""

    def __init__(self, generation: AsyncGeneration) -> None:
        self.generation = generation
        self.deltas = aiter(generation)
        self.read: list[Delta] = []

    @classmethod
    async def begin(cls, client: AsyncClient, **options: Unpack[GenerateOptions]) -> "Running":
        running = cls(client.generate(**options))
        running.read.append(await anext(running.deltas))
        return running

    async def finish(self) -> Choice:
        """Read the rest; its first choice."""
        self.read += [delta async for delta in self.deltas]
        return self.generation.output.choices[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), max_position=MAX_LEN, poison_token_id=POISON)


@pytest.fixture
async def server(model: Path) -> AsyncIterator[RealServer]:
    async with real_server(
        model,
        num_blocks=NUM_BLOCKS,
        max_model_len=MAX_LEN,
        max_num_seqs=2,
        max_queued_requests=2,
        pipeline_depth=1,
        speculative_config=NGRAM,
    ) as running:
        yield running


async def test_what_can_never_fit_is_refused_with_both_numbers(server: RealServer) -> None:
    pool = NUM_BLOCKS * BLOCK_SIZE
    with pytest.raises(InvalidRequestError, match=f"{pool + 1} tokens, but the KV cache holds {pool}") as caught:
        await server.client.generate(token_ids=[70] * (pool + 1))
    assert caught.value.violations[0].field == "token_ids.ids"
    with pytest.raises(InvalidRequestError, match=f"make {pool + 1} tokens, but the KV cache holds {pool}") as caught:
        await server.client.generate(token_ids=[70] * (pool - 1), max_tokens=2)
    assert caught.value.violations[0].field == "sampling.max_tokens"
    output = await server.client.generate(token_ids=[70] * (pool - 1), ignore_eos=True)
    assert output.choices[0].finished.usage.completion_tokens == 1
    await server.settle()


async def test_a_full_queue_refuses_and_recovers(server: RealServer) -> None:
    with slow_steps():
        running = [await Running.begin(server.client, **LONG) for _ in range(2)]
        waiting = [asyncio.ensure_future(server.client.generate("hi", max_tokens=2).text()) for _ in range(2)]
        await eventually_stats(server.client, lambda stats: stats.num_waiting == 2)
        for _ in range(20):
            with pytest.raises(OverloadedError) as caught:
                await server.client.generate("hi")
            assert caught.value.retry_after_s > 0
        for request in running:
            request.generation.cancel()
    await asyncio.gather(*waiting)
    await server.client.generate("hi", max_tokens=2)
    await server.settle()


async def test_a_duplicate_harms_nobody_and_its_id_comes_free(server: RealServer) -> None:
    alone = await server.client.generate(**LONG)
    for _ in range(2):
        with slow_steps():
            first = await Running.begin(server.client, **long(request_id="twin"))
            for text in ("hi", f"{SLOW}hi"):
                with pytest.raises(DuplicateRequestError):
                    await server.client.generate(text, request_id="twin")
        assert (await first.finish()).token_ids == alone.choices[0].token_ids
    await server.settle()


async def test_abort_says_what_it_found_and_keeps_what_there_was(server: RealServer) -> None:
    with slow_steps():
        a, b = [await Running.begin(server.client, **long(request_id=name)) for name in ("a", "b")]
        c = asyncio.ensure_future(server.client.generate(**long(request_id="c")).result())
        await eventually_stats(server.client, lambda stats: stats.num_waiting == 1)
        assert await server.client.abort("a", "nobody", "c") == {"a": True, "nobody": False, "c": True}
    choice = await a.finish()
    assert (choice.finished.finish_reason, choice.finished.stop_reason) == ("abort", None)
    assert choice.text == "".join(delta.text for delta in a.read)
    assert choice.token_ids == tuple(token_id for delta in a.read for token_id in delta.token_ids)
    assert choice.finished.usage.completion_tokens == len(choice.token_ids) < 300
    queued = await c
    assert [choice.finished.finish_reason for choice in queued.choices] == ["abort"]
    assert queued.started is None
    assert (await b.finish()).finished.usage.completion_tokens == 300
    assert await server.client.abort("a", "b", "c") == dict.fromkeys("abc", False)
    await server.settle()
    assert {call.status for call in server.front.calls()} == {"OK"}


async def test_a_request_whose_deadline_passes_in_the_queue_is_never_started(server: RealServer) -> None:
    with slow_steps():
        running = [await Running.begin(server.client, **LONG) for _ in range(2)]
        num_prompt_tokens = (await server.stats()).prompt_tokens
        queued = server.client.generate(token_ids=[80] * 100, timeout_s=1.0)
        with pytest.raises(DeadlineExceededError):
            await queued
        assert queued.started is None
    for request in running:
        assert (await request.finish()).finished.usage.completion_tokens == 300
    await server.settle()
    assert (await server.stats()).prompt_tokens == num_prompt_tokens


async def test_a_deadline_ends_a_running_request(server: RealServer) -> None:
    running = server.client.generate(**LONG, timeout_s=1.0)
    with slow_steps(), pytest.raises(DeadlineExceededError):
        await running
    assert running.started is not None
    await server.settle()
    assert [call.status for call in server.front.calls()] == ["DEADLINE_EXCEEDED"]


async def test_a_prompt_that_breaks_the_model_breaks_alone_and_leaves_no_trace(
    server: RealServer, caplog: pytest.LogCaptureFixture
) -> None:
    alone = await server.client.generate(**LONG)
    beside = asyncio.ensure_future(server.client.generate(**LONG).result())
    for length in (1, 200):  # within one block, and over many that others then get
        with pytest.raises(RequestFailedError) as caught:
            await server.client.generate(token_ids=[70] * length + [POISON])
        assert caught.value.error_id
        assert caught.value.error_id in caplog.text
    assert (await beside).choices[0].token_ids == alone.choices[0].token_ids
    wide = [70 + i % 90 for i in range((NUM_BLOCKS - 2) * BLOCK_SIZE)]
    await server.client.generate(token_ids=wide, max_tokens=8, cache_salt="every block")
    again = await server.client.generate(**long(cache_salt="not cached"))
    assert again.choices[0].token_ids == alone.choices[0].token_ids
    await server.settle()


async def test_an_exception_while_detokenising_ends_its_request_alone(
    server: RealServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = long(max_tokens=100)
    alone = (await server.client.generate(**mine)).choices[0].token_ids
    push = IncrementalDecoder.push

    def push_but_one(decoder: IncrementalDecoder, token_id: int) -> tuple[str, bool]:
        if token_id == UNTOUCHED:
            raise RuntimeError("a bug")
        return push(decoder, token_id)

    monkeypatch.setattr(IncrementalDecoder, "push", push_but_one)
    beside = asyncio.ensure_future(server.client.generate(**mine).result())
    with pytest.raises(RequestFailedError) as caught:
        await server.client.generate("hi", allowed_token_ids=[UNTOUCHED], max_tokens=50)
    assert caught.value.error_id in caplog.text
    assert "a bug" not in str(caught.value)
    assert (await beside).choices[0].token_ids == alone
    await server.settle()


async def test_a_dead_engine_is_unavailable_to_all(
    server: RealServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug() -> None:
        raise RuntimeError("a bug")

    with slow_steps():
        running = [await Running.begin(server.client, **long(request_id=str(i))) for i in range(2)]
        queued = asyncio.ensure_future(server.client.generate(**LONG).result())
        tokenising = asyncio.ensure_future(server.client.generate(f"{SLOW}hi").result())
        await eventually(lambda: bool(server.tokenizer.begun))
        monkeypatch.setattr(server.scheduler, "schedule", bug)
    for call in (*(request.finish() for request in running), queued, tokenising):
        with pytest.raises(UnavailableError, match="must be restarted"):
            await call
    assert "a bug" in caplog.text
    with pytest.raises(UnavailableError, match="must be restarted"):
        await server.client.generate("hi")
    assert await server.client.abort("0", "1") == {"0": False, "1": False}
    assert not server.engine.is_alive


async def test_steps_that_fail_end_their_requests_until_they_fail_in_a_row(
    server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = server.steps._executor.launch
    num_failures = 0

    def fail(plan: object) -> object:
        nonlocal num_failures
        num_failures += 1
        raise RuntimeError("the device is unwell")

    monkeypatch.setattr(server.steps._executor, "launch", fail)
    with pytest.raises(RequestFailedError):
        await server.client.generate("hi")
    monkeypatch.setattr(server.steps._executor, "launch", launch)
    await server.client.generate("hi", max_tokens=2)
    assert num_failures == 1
    await server.settle()
