"""The engine on a real event loop, its step thread, and a fake device: what every caller gets."""

import asyncio
import threading

import pytest

from server.engine.protocol import Finished, FinishReason, Started
from server.errors import DeadlineExceeded, DuplicateRequest, EngineDead, Overloaded
from server.events import StepFinished
from tests.fakes.core import make_request
from tests.fakes.eventually import eventually
from tests.fakes.executor import reference
from tests.fakes.native_engine import LONG, Letters, first_event, make_harness, receive, running_engine

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def letters(token_ids: list[int]) -> str:
    return Letters().decode(token_ids, skip_special_tokens=True)


@DEPTHS
@pytest.mark.parametrize("max_drafts", [0, 4])
async def test_every_choice_gets_its_own_tokens(depth: int, max_drafts: int) -> None:
    requests = [
        make_request(f"r{i}", range(i + 3), max_tokens=5 + i, n=1 + i % 3, seed=i, stop_token_ids=(i,))
        for i in range(12)
    ]
    async with running_engine(depth=depth, max_drafts=max_drafts) as harness:
        for request, received in zip(requests, await asyncio.gather(*map(harness.generate, requests)), strict=True):
            started = received.events[0]
            assert isinstance(started, Started)
            assert (started.request_id, started.num_prompt_tokens) == (
                request.request_id,
                len(request.prompt_token_ids),
            )
            for choice in range(request.sampling.n):
                expected, reason = reference(request, choice)
                end = received.finished[choice]
                assert received.token_ids(choice) == expected
                assert received.text(choice) == letters(expected[:-1] if reason is FinishReason.STOP else expected)
                assert (end.finish_reason, end.num_completion_tokens) == (reason, len(expected))
                assert end.stop_reason == (expected[-1] if reason is FinishReason.STOP else None)
        await harness.all_blocks_are_free()
        steps = [event for event in harness.events if isinstance(event, StepFinished)]
        assert sum(step.num_query_tokens for step in steps) >= sum(len(r.prompt_token_ids) for r in requests)


# -- open and abort --------------------------------------------------------------------------


async def test_abort_before_submit_closes_the_stream_and_frees_the_id() -> None:
    async with running_engine() as harness:
        stream = harness.engine.open("a")
        assert harness.engine.statistics().num_waiting == 1
        assert harness.engine.abort("a")
        assert not harness.engine.abort("a")
        harness.engine.submit(stream, make_request("a", range(3)))
        received = await receive(stream)
        assert [type(event) for event in received.events] == [Finished]
        assert received.finished[0].finish_reason is FinishReason.ABORT
        assert harness.engine.statistics().num_waiting == 0
        assert len((await harness.generate(make_request("a", range(3), max_tokens=4))).token_ids()) == 4


@DEPTHS
@pytest.mark.parametrize("phase", ["queued", "prefill", "running", "in flight"])
async def test_abort_in_every_phase(depth: int, phase: str) -> None:
    config = {"max_num_seqs": 1, "max_num_batched_tokens": 4} if phase != "running" else {}
    async with running_engine(depth=depth, **config) as harness:
        request = make_request("a", range(40), max_tokens=LONG, n=2)
        other = None
        if phase == "queued":
            other = harness.submit(make_request("other", range(3), max_tokens=20))
            await first_event(other)
        if phase == "in flight":
            harness.executor.may_settle.clear()
        stream = harness.submit(request)
        if phase == "in flight":
            await asyncio.to_thread(harness.executor.is_settling.wait, 30)
        elif phase in ("prefill", "running"):
            assert isinstance(await first_event(stream), Started)
        assert harness.engine.abort("a")
        harness.executor.may_settle.set()
        received = await receive(stream)
        assert received.error is None
        for index in range(2):
            end = received.finished[index]
            assert end.finish_reason is FinishReason.ABORT
            assert end.num_completion_tokens == len(received.token_ids(index))
            assert received.token_ids(index) == reference(request, index)[0][: end.num_completion_tokens]
        if other is not None:
            assert (await receive(other)).finished[0].num_completion_tokens == 20
        await harness.all_blocks_are_free()


async def test_a_live_id_is_refused_and_its_owner_unharmed() -> None:
    request = make_request("a", range(3), max_tokens=30)
    async with running_engine() as harness:
        stream = harness.submit(request)
        with pytest.raises(DuplicateRequest):
            harness.engine.open("a")
        assert (await receive(stream)).token_ids() == reference(request, 0)[0]
        assert (await harness.generate(request)).token_ids() == reference(request, 0)[0]


@DEPTHS
async def test_an_id_used_again_gets_nothing_of_its_former_owner(depth: int) -> None:
    """Outputs of the aborted one may still be on their way to the loop."""
    async with running_engine(depth=depth) as harness:
        for round_number in range(50):
            former = harness.submit(make_request("a", range(3), max_tokens=LONG))
            await first_event(former)
            assert harness.engine.abort("a")
            request = make_request("a", range(5), max_tokens=3, seed=round_number)
            received = await harness.generate(request)
            assert received.token_ids() == reference(request, 0)[0]
        await harness.all_blocks_are_free()


async def test_a_foreign_stream_is_not_submitted() -> None:
    async with running_engine() as harness:
        former = harness.engine.open("a")
        harness.engine.abort("a")
        harness.engine.open("a")
        harness.engine.submit(former, make_request("a", range(3)))
        assert harness.engine.statistics().num_waiting == 1


async def test_a_full_queue_refuses_until_a_place_is_free() -> None:
    async with running_engine(max_queued_requests=2, max_num_seqs=1) as harness:
        running = harness.submit(make_request("running", range(3), max_tokens=LONG))
        await first_event(running)
        queued = [harness.submit(make_request("queued", range(3), max_tokens=2)), harness.engine.open("tokenising")]
        with pytest.raises(Overloaded, match="2 requests wait, the limit is 2") as refusal:
            harness.engine.open("refused")
        assert refusal.value.retry_after_s > 0
        harness.engine.abort("tokenising")
        queued.append(harness.submit(make_request("next", range(3), max_tokens=2)))
        with pytest.raises(Overloaded):
            harness.engine.open("refused")
        harness.engine.abort("running")
        for stream in (running, *queued):
            assert (await receive(stream)).error is None
        for name in ("x", "y"):
            harness.engine.open(name)


async def test_a_burst_finds_the_free_seats_before_the_queue() -> None:
    async with running_engine(max_queued_requests=2, max_num_seqs=4) as harness:
        streams = [harness.submit(make_request(f"r{i}", range(3), max_tokens=2)) for i in range(6)]
        with pytest.raises(Overloaded, match="2 requests wait, the limit is 2"):
            harness.engine.open("refused")
        for stream in streams:
            assert (await receive(stream)).error is None


async def test_what_broke_off_is_told_how_far_it_came() -> None:
    async with running_engine() as harness:
        stream = harness.submit(make_request("a", range(3), max_tokens=LONG, deadline_s=harness.engine.now() + 5))
        await first_event(stream)
        harness.clock.now_s += 10
        assert isinstance((await receive(stream)).error, DeadlineExceeded)
        (choice,) = stream.finished
        assert choice.finish_reason is FinishReason.ABORT
        assert choice.num_completion_tokens > 0
        assert choice.timing.total_s >= 10


# -- deadlines -------------------------------------------------------------------------------


async def test_deadline_while_tokenising() -> None:
    async with running_engine() as harness:
        expired = await receive(harness.engine.open("a", deadline_s=harness.engine.now() + 0.01))
        assert isinstance(expired.error, DeadlineExceeded)
        assert expired.error.phase == "tokenising"
        assert not harness.engine.abort("a")


async def test_once_submitted_the_engine_clock_alone_decides() -> None:
    async with running_engine() as harness:
        stream = harness.engine.open("a", deadline_s=1000.0)
        expiry = harness.engine._live["a"].expiry
        assert expiry is not None
        harness.engine.submit(stream, make_request("a", range(3), max_tokens=2, deadline_s=1000.0))
        assert expiry.cancelled()
        assert (await receive(stream)).error is None


@DEPTHS
async def test_deadline_while_queued_and_running(depth: int) -> None:
    async with running_engine(depth=depth, max_num_seqs=1) as harness:
        running = harness.submit(make_request("running", range(3), max_tokens=LONG, deadline_s=1000.0))
        await first_event(running)
        queued = harness.submit(make_request("queued", range(3), max_tokens=2, n=2, deadline_s=500.0))
        harness.clock.now_s = 600.0
        received = await receive(queued)
        assert isinstance(received.error, DeadlineExceeded)
        assert received.error.phase == "queued"
        assert received.events == []
        harness.clock.now_s = 1000.0
        received = await receive(running)
        assert isinstance(received.error, DeadlineExceeded)
        assert received.error.phase == "running"
        assert received.token_ids() != []
        await harness.all_blocks_are_free()


async def test_a_deadline_in_the_past_is_not_started() -> None:
    async with running_engine() as harness:
        harness.clock.now_s = 10.0
        request = make_request("a", range(3), deadline_s=9.0)
        stream = harness.engine.open("a")
        harness.engine.submit(stream, request)
        assert isinstance((await receive(stream)).error, DeadlineExceeded)
        assert harness.executor.inner.plans == []


# -- stop strings ----------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("max_drafts", [0, 5])
@pytest.mark.parametrize("length", [1, 2, 3])
async def test_stop_string_at_every_offset(depth: int, max_drafts: int, length: int) -> None:
    """It replaces the end that the scheduler would find later, and nothing behind it is counted."""
    free = make_request("a", range(3), max_tokens=9)
    text = letters(reference(free, 0)[0])
    async with running_engine(depth=depth, max_drafts=max_drafts) as harness:
        for start in range(len(text) - length + 1):
            stop = text[start : start + length]
            num_tokens = text.index(stop) + length
            request = make_request("a", range(3), max_tokens=9, stop=stop, logprobs=0)
            received = await harness.generate(request)
            end = received.finished[0]
            assert (end.finish_reason, end.stop_reason) == (FinishReason.STOP, stop)
            assert received.text() == text[: text.index(stop)]
            assert len(received.token_ids()) == end.num_completion_tokens == num_tokens
        await harness.all_blocks_are_free()


async def test_stop_string_ends_the_computing_too() -> None:
    request = make_request("a", range(3), max_tokens=LONG)
    stop = letters(reference(request, 0)[0][:2])
    async with running_engine() as harness:
        received = await harness.generate(make_request("a", range(3), max_tokens=LONG, stop=stop))
        assert received.token_ids() == reference(request, 0)[0][:2]
        await harness.all_blocks_are_free()
        assert len(harness.executor.inner.plans) < LONG // 2


async def test_stop_string_of_one_choice_leaves_the_others() -> None:
    free = make_request("a", range(3), max_tokens=9, n=2)
    texts = [letters(reference(free, choice)[0]) for choice in range(2)]
    stop = next(letter for letter in texts[0] if letter not in texts[1])
    async with running_engine(depth=1) as harness:
        received = await harness.generate(make_request("a", range(3), max_tokens=9, n=2, stop=stop))
        assert received.text(0) == texts[0][: texts[0].index(stop)]
        assert received.text(1) == texts[1]
        assert received.finished[1].finish_reason is FinishReason.LENGTH
        await harness.all_blocks_are_free()


# -- what breaks -----------------------------------------------------------------------------


async def test_an_exception_in_detokenising_ends_that_request_alone() -> None:
    bad = make_request("bad", range(3), max_tokens=LONG)
    good = make_request("good", range(3), max_tokens=9, seed=1)
    poison = next(t for t in reference(bad, 0)[0] if t not in (*reference(good, 0)[0], 0, 1, 2))

    class Broken(Letters):
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            if poison in token_ids:
                raise KeyError(poison)
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    async with running_engine(decoder=Broken()) as harness:
        broken, fine = await asyncio.gather(harness.generate(bad), harness.generate(good))
        assert "detokenising failed" in str(broken.error)
        assert broken.token_ids() == reference(bad, 0)[0][: reference(bad, 0)[0].index(poison)]
        assert fine.token_ids() == reference(good, 0)[0]
        await harness.all_blocks_are_free()
        assert len(harness.executor.inner.plans) < LONG // 2


async def test_a_broken_row_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with running_engine() as harness:
        harness.executor.inner.row_error_rate = 1.0
        received = await harness.generate(make_request("bad", range(3)))
        harness.executor.inner.row_error_rate = 0.0
        assert "the logits are NaN (error id " in str(received.error)
        error_id = str(received.error).split()[-1].rstrip(")")
        assert error_id in caplog.text
        assert (await harness.generate(make_request("good", range(3)))).error is None


async def test_stop_ends_open_streams() -> None:
    harness = make_harness(max_num_seqs=1)
    await harness.engine.start()
    streams = [harness.submit(make_request(f"r{i}", range(3), max_tokens=LONG)) for i in range(3)]
    streams.append(harness.engine.open("tokenising"))
    await first_event(streams[0])
    harness.executor.may_settle.clear()
    stopping = asyncio.ensure_future(harness.engine.stop())
    await asyncio.sleep(0)
    harness.executor.may_settle.set()
    await stopping
    for stream in streams:
        assert isinstance((await receive(stream)).error, EngineDead)
    with pytest.raises(EngineDead):
        harness.engine.open("late")


@pytest.mark.parametrize("error", [None, RuntimeError("no memory")])
async def test_a_start_that_is_given_up_is_stopped_without_a_word(error: Exception | None) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def warm_up() -> None:
        begun.set()
        may_end.wait(30)
        if error is not None:
            raise error

    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    engine = make_harness(warm_up=warm_up).engine
    starting = asyncio.create_task(engine.start())
    await asyncio.to_thread(begun.wait, 30)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    may_end.set()
    await engine.stop()
    await asyncio.sleep(0)
    assert not engine.is_alive
    assert told == []


async def test_a_stop_is_a_stop_whatever_fails_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("the store is broken")

    engine = make_harness(on_stopped=fail).engine
    await engine.start()
    stream = engine.open("tokenising")
    await engine.stop()
    assert isinstance((await receive(stream)).error, EngineDead)
    assert "the store is broken" in caplog.text


async def test_a_reader_that_reads_nothing_holds_nobody_up() -> None:
    request = make_request("unread", range(3), max_tokens=200)
    async with running_engine() as harness:
        unread = harness.submit(request)
        other = make_request("other", range(3), max_tokens=150)
        assert (await harness.generate(other)).token_ids() == reference(other, 0)[0]
        await harness.all_blocks_are_free()
        await eventually(lambda: not harness.engine._live)  # the blocks are free before the last outputs are here
        received = await receive(unread)
        assert received.token_ids() == reference(request, 0)[0]
        assert [type(event).__name__ for event in received.events] == ["Started", "Delta", "Finished"]


async def test_timing_adds_up() -> None:
    async with running_engine(max_num_seqs=1) as harness:
        harness.clock.now_s = 10.0
        end = (await harness.generate(make_request("a", range(3), max_tokens=4, arrival_s=7.0))).finished[0].timing
        assert (end.queue_s, end.prefill_s, end.decode_s, end.ttft_s, end.total_s) == (3.0, 0.0, 0.0, 3.0, 3.0)
