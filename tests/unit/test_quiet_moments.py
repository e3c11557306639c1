"""Actions that wait for a moment in which no request is under way, as exchanging the model's layers does."""

import asyncio

import pytest

from tests.fakes.core import make_request
from tests.fakes.eventually import eventually
from tests.fakes.native_engine import LONG, first_event, running_engine


@pytest.mark.parametrize("depth", [0, 1])
async def test_an_action_waits_for_a_quiet_moment(depth: int) -> None:
    num_live: list[bool] = []
    async with running_engine(depth=depth) as harness:
        busy = harness.submit(make_request("busy", range(3), max_tokens=LONG))
        await first_event(busy)
        harness.steps.run_when_quiet(lambda: num_live.append(harness.steps._scheduler.has_started), patience_s=1e9)
        other = await harness.generate(make_request("other", range(3), max_tokens=5))
        assert len(other.token_ids()) == 5  # nobody is held back while there is patience
        assert num_live == []
        harness.engine.abort("busy")
        await eventually(lambda: num_live == [False])


@pytest.mark.parametrize("depth", [0, 1])
async def test_without_patience_new_requests_wait_for_the_running_ones(depth: int) -> None:
    order: list[str] = []
    async with running_engine(depth=depth) as harness:
        busy = harness.submit(make_request("busy", range(3), max_tokens=LONG))
        await first_event(busy)
        harness.steps.run_when_quiet(lambda: order.append("action"), patience_s=0.0)
        late = asyncio.create_task(harness.generate(make_request("late", range(3), max_tokens=5)))
        late.add_done_callback(lambda _: order.append("late"))
        await eventually(lambda: harness.engine.statistics().num_waiting == 1)
        assert order == []
        harness.engine.abort("busy")
        assert len((await late).token_ids()) == 5
        assert order == ["action", "late"]


async def test_an_action_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("not today")

    async with running_engine() as harness:
        harness.steps.run_when_quiet(fail, patience_s=0.0)
        await eventually(lambda: "not today" in caplog.text)
        assert len((await harness.generate(make_request("r", range(3), max_tokens=5))).token_ids()) == 5
