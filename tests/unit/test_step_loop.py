"""The step loop on a fake device, behind a real engine: when outputs leave it, and what a step that fails ends."""

import asyncio
import threading

import pytest

from server.engine.protocol import Delta
from server.errors import EngineDead
from server.plan import StepPlan
from server.scheduler.outputs import SequenceOutput
from tests.fakes.core import make_request
from tests.fakes.eventually import eventually
from tests.fakes.executor import reference
from tests.fakes.native_engine import LONG, Harness, first_event, make_harness, receive, running_engine

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@DEPTHS
async def test_outputs_are_handed_over_once_the_device_has_work(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine(depth=depth) as harness:
        num_launched: list[int] = []
        hand_over = harness.steps._on_outputs

        def note(outputs: list[SequenceOutput]) -> None:
            num_launched.append(len(harness.executor.inner.plans))
            hand_over(outputs)

        monkeypatch.setattr(harness.steps, "_on_outputs", note)
        assert len((await harness.generate(make_request("a", range(3), max_tokens=5))).token_ids()) == 5
        assert num_launched == ([2, 3, 4, 5, 5], [3, 4, 5, 5, 5])[depth]


async def test_an_executor_that_computes_while_it_launches_has_outputs_handed_over_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_engine() as harness:
        launch, has_first = harness.executor.launch, threading.Event()
        num_launched = 0

        def compute(plan: StepPlan) -> object:
            nonlocal num_launched
            num_launched += 1
            harness.steps.hand_over()
            assert num_launched < 2 or has_first.wait(timeout=30)
            return launch(plan)

        monkeypatch.setattr(harness.executor, "launch", compute)
        async for event in harness.submit(make_request("a", range(3), max_tokens=3)):
            if isinstance(event, Delta):
                has_first.set()
        assert has_first.is_set()
        assert num_launched == 3


@DEPTHS
async def test_tokens_of_several_sequences_come_together_but_for_the_first_and_the_last(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [make_request(f"r{i}", range(i + 3), max_tokens=20 + i) for i in range(6)]
    async with running_engine(depth=depth, stream_patience_s=0.025) as harness:
        batches: list[list[SequenceOutput]] = []
        launch, hand_over = harness.executor.launch, harness.steps._on_outputs

        def launch_later(plan: StepPlan) -> object:
            harness.clock.now_s += 0.01
            return launch(plan)

        def note(outputs: list[SequenceOutput]) -> None:
            batches.append(outputs)
            hand_over(outputs)

        monkeypatch.setattr(harness.executor, "launch", launch_later)
        monkeypatch.setattr(harness.steps, "_on_outputs", note)
        for request, received in zip(requests, await asyncio.gather(*map(harness.generate, requests)), strict=True):
            assert received.token_ids() == reference(request, 0)[0]
    for batch in batches:
        newest_s = max(output.settled_s for output in batch)
        assert all(newest_s - output.settled_s < 0.025 for output in batch)
        assert all(output.settled_s == newest_s for output in batch if output.is_first or output.finish_reason)
    assert max(len({output.settled_s for output in batch}) for batch in batches) == 3
    assert sum(output.is_first for batch in batches for output in batch) == len(requests)


async def broken_steps(harness: Harness, kind: str, count: int) -> None:
    """Break the next steps of a running request, with another one waiting behind it."""
    running = harness.submit(make_request("running", range(3), max_tokens=LONG))
    await first_event(running)
    if kind == "launch":
        harness.executor.num_launch_errors = count
    else:
        harness.executor.num_settle_errors = count
    assert "the step failed: InjectedError" in str((await receive(running)).error)


@DEPTHS
@pytest.mark.parametrize("kind", ["launch", "settle"])
async def test_a_failed_step_ends_its_rows_and_the_engine_lives(depth: int, kind: str) -> None:
    request = make_request("next", range(4), max_tokens=20)
    async with running_engine(depth=depth) as harness:
        for _ in range(5):
            await broken_steps(harness, kind, 1)
            assert (await harness.generate(request)).token_ids() == reference(request, 0)[0]
        await harness.all_blocks_are_free()


@DEPTHS
@pytest.mark.parametrize("kind", ["launch", "settle"])
async def test_three_failed_steps_in_a_row_end_the_engine(depth: int, kind: str) -> None:
    harness = make_harness(depth=depth, max_num_seqs=1)
    death = asyncio.Event()
    await harness.engine.start(death.set)
    if kind == "launch":
        harness.executor.num_launch_errors = 3
    else:
        harness.executor.num_settle_errors = 3
    streams = [harness.submit(make_request(f"r{i}", range(3), max_tokens=9)) for i in range(5)]
    streams.append(harness.engine.open("tokenising"))
    received = await asyncio.gather(*map(receive, streams))
    names = [type(one.error).__name__ for one in received]
    num_failed = names.index("EngineDead")
    assert num_failed in (1, 2), "at depth 1 a request may take part in two of the three steps"
    assert names == ["RequestFailed"] * num_failed + ["EngineDead"] * (6 - num_failed)
    await asyncio.wait_for(death.wait(), 30)
    assert not harness.engine.is_alive
    with pytest.raises(EngineDead):
        harness.engine.open("late")
    await harness.engine.stop()


async def test_a_failed_warm_up_ends_the_start_and_what_was_opened() -> None:
    may_end = threading.Event()

    def warm_up() -> None:
        assert may_end.wait(timeout=30)
        raise ValueError("no device")

    harness = make_harness(warm_up=warm_up)
    starting = asyncio.ensure_future(harness.engine.start())
    await eventually(lambda: harness.engine.is_alive)
    stream = harness.submit(make_request("early", range(3)))
    may_end.set()
    with pytest.raises(ValueError, match="no device"):
        await starting
    assert isinstance((await receive(stream)).error, EngineDead)
    assert not harness.engine.is_alive
    with pytest.raises(EngineDead):
        harness.engine.open("late")
    await harness.engine.stop()


async def test_requests_opened_during_warm_up_are_served_after_it() -> None:
    request = make_request("early", range(3), max_tokens=4)
    may_end = threading.Event()
    harness = make_harness(warm_up=lambda: None if may_end.wait(timeout=30) else pytest.fail("too late"))
    starting = asyncio.ensure_future(harness.engine.start())
    await eventually(lambda: harness.engine.is_alive)
    stream = harness.submit(request)
    assert not starting.done()
    may_end.set()
    await starting
    received = await receive(stream)
    assert received.token_ids() == reference(request, 0)[0]
    await harness.engine.stop()
