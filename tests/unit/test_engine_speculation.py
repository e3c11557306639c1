"""Changes of speculation on their way to the step thread and back."""

import asyncio

import pytest

from server.errors import EngineDead, InvalidRequest
from server.speculation_state import SpeculationChange
from tests.fakes.core import make_request
from tests.fakes.executor import reference
from tests.fakes.native_engine import receive, running_engine
from tests.fakes.speculative import speculative_config

FOUR = speculative_config({"num_speculative_tokens": 4, "policy": "fixed"})
OFF, ON = SpeculationChange(enabled=False), SpeculationChange(enabled=True)
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@DEPTHS
async def test_it_changes_between_two_steps(depth: int) -> None:
    """Off, nothing more is verified, and the rest of the text is the same."""
    request = make_request("r", range(5), max_tokens=400)
    async with running_engine(depth=depth, max_drafts=4, speculative=FOUR) as harness:
        receiving = asyncio.create_task(harness.generate(request))
        state = await harness.engine.set_speculation(OFF)
        assert (state, state.enabled) == (harness.engine.speculation, False)
        # What was in flight has settled once another change has come and gone.
        await harness.engine.set_speculation(SpeculationChange(num_speculative_tokens=3))
        received = await receiving
        assert received.token_ids() == reference(request, 0)[0]
        assert sum(received.finished[0].speculation.acceptance_histogram[1:]) <= 2
        await harness.engine.set_speculation(ON)
        again = await harness.generate(make_request("again", range(5), max_tokens=100))
        assert len(harness.engine.statistics().draft_tokens_per_position) == 3
        assert again.finished[0].speculation.num_draft_tokens > 50


async def test_the_model_s_description_follows() -> None:
    async with running_engine(max_drafts=4, speculative=FOUR) as harness:
        await harness.engine.set_speculation(SpeculationChange(num_speculative_tokens=2))
        assert harness.engine.model_info.num_speculative_tokens == 2
        await harness.engine.set_speculation(OFF)
        assert harness.engine.model_info.speculative_method == "none"


async def test_a_refusal_reaches_the_caller() -> None:
    async with running_engine(max_drafts=4, speculative=FOUR) as harness:
        with pytest.raises(InvalidRequest, match="num_speculative_tokens: must be from 1 to 4"):
            await harness.engine.set_speculation(SpeculationChange(num_speculative_tokens=5))
        assert (await harness.generate(make_request("r", range(3), max_tokens=3))).error is None


async def test_who_leaves_is_not_waited_for() -> None:
    """The change is made all the same: it was on its way."""
    async with running_engine(max_drafts=4, speculative=FOUR) as harness:
        harness.executor.may_settle.clear()
        stream = harness.submit(make_request("r", range(3), max_tokens=9))
        await asyncio.to_thread(harness.executor.is_settling.wait, 30)
        changing = asyncio.create_task(harness.engine.set_speculation(OFF))
        await asyncio.sleep(0)
        changing.cancel()
        harness.executor.may_settle.set()
        await receive(stream)
        assert not (await harness.engine.set_speculation(SpeculationChange())).enabled
        assert changing.cancelled()


async def test_the_end_of_the_engine_ends_the_wait() -> None:
    async with running_engine(max_drafts=4, speculative=FOUR) as harness:
        harness.executor.may_settle.clear()
        stream = harness.submit(make_request("r", range(3), max_tokens=9))
        await asyncio.to_thread(harness.executor.is_settling.wait, 30)
        stopping = asyncio.create_task(harness.engine.stop())
        await asyncio.sleep(0)
        changing = asyncio.create_task(harness.engine.set_speculation(OFF))
        await asyncio.sleep(0)
        harness.executor.may_settle.set()
        await stopping
        with pytest.raises(EngineDead, match="stopped"):
            await changing
        with pytest.raises(EngineDead, match="restarted"):
            await harness.engine.set_speculation(ON)
        assert isinstance((await receive(stream)).error, EngineDead)
