"""The whole of it on a tiny model: client, front, engine, scheduler, worker, n-gram speculation."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Unpack

import pytest

from clients.errors import DeadlineExceededError, DuplicateRequestError, OverloadedError, RequestFailedError
from clients.requests import GenerateOptions
from tests.fakes.eventually import eventually, eventually_stats
from tests.fakes.front import Front
from tests.fakes.served_model import served_model
from tests.fakes.slow_steps import slow_steps
from tests.tiny_model import build_tiny_model

PROMPT = "One two three four five, once I caught a fish alive; one two three four"
POISON = 300


def long(**more: Unpack[GenerateOptions]) -> GenerateOptions:
    """Options of an answer that takes a while."""
    return {"max_tokens": 200, "ignore_eos": True, "temperature": 0.0, **more}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), poison_token_id=POISON)


@pytest.fixture
async def front(model: Path) -> AsyncIterator[Front]:
    async with served_model(model) as running:
        yield running


async def all_blocks_come_back(front: Front) -> None:
    await eventually_stats(
        front.client, lambda stats: stats.num_running == 0 and stats.kv_blocks_free == stats.kv_blocks_total
    )


async def test_deltas_join_to_text_ids_and_usage(front: Front) -> None:
    generation = front.client.generate(PROMPT, max_tokens=40, n=3, logprobs=2, seed=3, temperature=1.5, stop=["zz"])
    texts, ids = {0: "", 1: "", 2: ""}, {0: 0, 1: 0, 2: 0}
    async for delta in generation:
        texts[delta.index] += delta.text
        ids[delta.index] += len(delta.token_ids)
        assert len(delta.logprobs) == len(delta.token_ids)
    output = generation.output
    assert output.started is not None
    assert output.started.prompt_tokens == len(await front.client.tokenize(PROMPT))
    for choice in output.choices:
        assert choice.text == texts[choice.index]
        assert len(choice.token_ids) == ids[choice.index] == choice.finished.usage.completion_tokens
        assert [position.chosen.token_id for position in choice.logprobs] == list(choice.token_ids)
        assert choice.finished.timing.total_seconds >= choice.finished.timing.time_to_first_token_seconds > 0
    assert len({choice.token_ids for choice in output.choices}) == 3


async def test_answers_do_not_depend_on_speculation(front: Front) -> None:
    drafted = await front.client.generate(PROMPT, **long())
    plain = await front.client.generate(PROMPT, **long(speculation=False))
    assert drafted.choices[0].token_ids == plain.choices[0].token_ids
    assert drafted.choices[0].finished.speculation.num_draft_tokens > 0
    assert plain.choices[0].finished.speculation.num_draft_tokens == 0
    assert plain.started is not None
    assert plain.started.cached_tokens > 0, "the second one finds the first one's prefix"


async def test_prompt_one_below_the_limit_yields_one_token(front: Front) -> None:
    output = await front.client.generate(token_ids=[70] * 511, ignore_eos=True)
    assert len(output.choices[0].token_ids) == 1
    assert output.choices[0].finished.finish_reason == "length"


async def test_abort_and_duplicates_by_id(front: Front) -> None:
    with slow_steps():
        generation = front.client.generate(PROMPT, **long(request_id="mine", n=2))
        deltas = aiter(generation)
        await anext(deltas)
        with pytest.raises(DuplicateRequestError):
            await front.client.generate("hi", request_id="mine")
        assert await front.client.abort("mine", "other") == {"mine": True, "other": False}
    async for _ in deltas:
        pass
    assert {index: end.finish_reason for index, end in generation.finished.items()} == {0: "abort", 1: "abort"}
    assert await front.client.abort("mine") == {"mine": False}
    await all_blocks_come_back(front)


async def test_leaving_frees_everything(front: Front) -> None:
    async def leave() -> None:
        async for _ in front.client.generate(PROMPT, **long(n=2)):
            break

    with slow_steps():
        await asyncio.gather(*(leave() for _ in range(8)))
        await eventually(lambda: len(front.calls()) == 8)
    await all_blocks_come_back(front)
    assert {call.status for call in front.calls()} == {"CANCELLED"}


async def test_a_late_reader_gets_all_and_delays_nobody(front: Front) -> None:
    late = [front.client.generate(PROMPT, **long(logprobs=20)) for _ in range(3)]
    prompt = await front.client.generate(PROMPT, **long())
    await eventually(lambda: len(front.calls()) == 4)
    for generation in late:
        output = await generation
        assert output.choices[0].token_ids == prompt.choices[0].token_ids
        assert output.text == prompt.text


async def test_a_request_that_breaks_breaks_alone(front: Front) -> None:
    other = asyncio.ensure_future(front.client.generate(PROMPT, **long()).text())
    with pytest.raises(RequestFailedError) as caught:
        await front.client.generate(token_ids=[70, POISON])
    assert caught.value.error_id
    assert await other
    await all_blocks_come_back(front)
    assert sorted(call.status for call in front.calls()) == ["INTERNAL", "OK"]


async def test_a_deadline_holds_in_the_queue(model: Path) -> None:
    async with served_model(model, max_num_seqs=1) as front:
        with slow_steps():
            running = aiter(front.client.generate(PROMPT, **long(max_tokens=400)))
            await anext(running)
            queued = front.client.generate("hi", timeout_s=1.0, max_tokens=1)
            with pytest.raises(DeadlineExceededError):
                await queued
            assert queued.started is None
            await eventually(lambda: bool(front.calls()))
        (call,) = front.calls()
        assert (call.status, call.num_completion_tokens) == ("DEADLINE_EXCEEDED", 0)


async def test_a_deadline_holds_while_running(front: Front) -> None:
    with slow_steps(), pytest.raises(DeadlineExceededError):
        await front.client.generate(PROMPT, timeout_s=2.0, **long(max_tokens=400, n=8))
    await eventually(lambda: bool(front.calls()))
    await all_blocks_come_back(front)
    (call,) = front.calls()
    assert call.status == "DEADLINE_EXCEEDED"
    assert call.num_completion_tokens > 0


async def test_a_full_queue_refuses_with_a_hint(model: Path) -> None:
    async with served_model(model, max_num_seqs=1, max_queued_requests=1) as front:
        with slow_steps():
            first = aiter(front.client.generate(PROMPT, **long()))
            await anext(first)
            second = asyncio.ensure_future(front.client.generate("hi", max_tokens=1).text())
            await eventually_stats(front.client, lambda stats: stats.num_waiting == 1)
            with pytest.raises(OverloadedError) as caught:
                await front.client.generate("hi", max_tokens=1)
        assert caught.value.retry_after_s > 0
        async for _ in first:
            pass
        await second
