"""One client over prefill and decode nodes that follow a script."""

import asyncio
import re
from collections.abc import AsyncIterator

import pytest

from clients.disaggregated import DisaggregatedClient
from clients.errors import (
    CancelledCallError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    UnavailableError,
)
from clients.outputs import Delta, Event, Finished, Started
from server.engine import protocol
from server.engine.protocol import FinishReason, StreamEvent
from server.errors import EngineDead, Overloaded
from server.kv_handle import ChoiceState
from server.request import Request
from server.tokenizer import Tokenizer
from tests.fakes.eventually import eventually
from tests.fakes.scripted_engine import Script
from tests.fakes.scripted_nodes import (
    PROMPT,
    QUICK,
    SOURCE,
    FailsAfter,
    FirstStops,
    behind_gates,
    end,
    expected,
    holding_back,
    never_beginning,
    running_nodes,
    sharing,
    stopping_short,
)


async def test_two_nodes_stream_as_one(tokenizer: Tokenizer) -> None:
    async with running_nodes(tokenizer, [sharing], [sharing]) as nodes:
        generation = nodes.client.generate(token_ids=PROMPT, max_tokens=4, n=3, request_id="mine")
        events: list[Event] = [event async for event in generation.events()]
    assert [type(event) for event in events].count(Started) == 1
    assert isinstance(events[0], Started)
    assert {event.index: event.finish_reason for event in events if isinstance(event, Finished)} == dict.fromkeys(
        range(3), "length"
    )
    for choice in generation.output.choices:
        assert (choice.text, list(choice.token_ids)) == (expected(4), PROMPT[:4])
        assert choice.finished.usage.completion_tokens == 4
        assert choice.finished.usage.cached_tokens == 3, "of the node that computed the prompt"
        timing = choice.finished.timing
        assert (timing.time_to_first_token_seconds, timing.decode_seconds, timing.total_seconds) == (0.75, 1.125, 2.0)
    [begun], [gone_on] = nodes.begun, nodes.gone_on
    assert (begun.request_id, gone_on.request_id) == ("mine", "mine")
    assert gone_on.continuation is not None
    assert [state and state.key for state in gone_on.continuation.choices] == [40, 41, 42]
    assert gone_on.continuation.source == SOURCE


@pytest.mark.parametrize(
    "prompt", [{"prompt": "a text of some words"}, {"messages": [{"role": "user", "content": "a text of some words"}]}]
)
async def test_the_decode_node_gets_the_ids_of_a_text(tokenizer: Tokenizer, prompt: dict[str, object]) -> None:
    async with running_nodes(tokenizer, [sharing], [sharing], min_prompt_tokens=1) as nodes:
        output = await nodes.client.generate(max_tokens=3, **prompt)  # type: ignore[arg-type]
    [begun], [gone_on] = nodes.begun, nodes.gone_on
    assert begun.prompt_token_ids == gone_on.prompt_token_ids
    assert begun.request_id == gone_on.request_id
    assert output.started is not None
    assert output.started.request_id == begun.request_id


async def test_one_token_needs_no_decode_node(tokenizer: Tokenizer) -> None:
    async with running_nodes(tokenizer, [sharing], [sharing]) as nodes:
        generation = nodes.client.generate(token_ids=PROMPT, max_tokens=1, n=2)
        assert [choice.finished.finish_reason for choice in (await generation).choices] == ["length", "length"]
    assert generation.prefill_target == nodes.fronts[0].target
    assert generation.decode_target is None
    assert not nodes.gone_on


async def test_choices_that_have_ended_are_left_alone(tokenizer: Tokenizer) -> None:
    async def first_ends(request: Request) -> AsyncIterator[StreamEvent]:
        async for event in sharing(request):
            if isinstance(event, protocol.Finished) and event.index == 0:
                event = end(request, 0, 1, FinishReason.STOP)
            yield event

    async with running_nodes(tokenizer, [first_ends], [sharing]) as nodes:
        output = await nodes.client.generate(token_ids=PROMPT, max_tokens=4, n=2)
    assert [choice.finished.finish_reason for choice in output.choices] == ["stop", "length"]
    assert [choice.text for choice in output.choices] == [expected(1), expected(4)]
    assert nodes.gone_on[0].continuation is not None
    assert nodes.gone_on[0].continuation.choices == (None, ChoiceState((PROMPT[0],), 41, 1))


async def test_short_prompts_and_known_ones_take_no_hop(tokenizer: Tokenizer) -> None:
    async with running_nodes(tokenizer, [sharing], [sharing, sharing]) as nodes:
        await nodes.client.generate(token_ids=PROMPT[:7], max_tokens=3)
        assert not nodes.begun
        first = nodes.client.generate(token_ids=PROMPT, max_tokens=3)
        await first
        assert len(nodes.begun) == 1
        again = nodes.client.generate(token_ids=PROMPT, max_tokens=3)
        assert await again.text() == expected(3)
        assert len(nodes.begun) == 1
    assert again.decode_target == first.decode_target
    assert again.prefill_target is None


async def test_without_prefill_nodes_a_decode_node_does_it_all(tokenizer: Tokenizer) -> None:
    async with running_nodes(tokenizer, [], [sharing], lost=2) as nodes:
        generation = nodes.client.generate(token_ids=PROMPT, max_tokens=3)
        assert await generation.text() == expected(3)
        assert nodes.gone_on[0].continuation is None
        assert generation.prefill_target is None
        await nodes.client.generate(token_ids=PROMPT[1:], max_tokens=3)
    assert [request.continuation for request in nodes.gone_on] == [None, None]


async def test_another_prefill_node_takes_over_before_the_first_token(tokenizer: Tokenizer) -> None:
    dying = FailsAfter(EngineDead("restart"), 1)
    async with running_nodes(tokenizer, [dying, sharing, dying], [sharing]) as nodes:
        for first in range(10, 20):  # so that some go to a node that fails
            prompt = [first, *PROMPT]
            events = [event async for event in nodes.client.generate(token_ids=prompt, max_tokens=3).events()]
            assert [type(event) for event in events] == [Started, Delta, Delta, Delta, Finished]
    assert len(nodes.begun) > 10
    assert all(request.continuation for request in nodes.gone_on)


async def test_a_prefill_node_that_is_lost_later_is_gone_on_from(tokenizer: Tokenizer) -> None:
    """The first choice was handed on and the second one has delivered a token; the third was not begun."""
    async with running_nodes(tokenizer, [FailsAfter(EngineDead("restart"), 4)], [sharing]) as nodes:
        output = await nodes.client.generate(token_ids=PROMPT, max_tokens=3, n=3)
    assert [choice.text for choice in output.choices] == [expected(3)] * 3
    assert nodes.gone_on[0].continuation is not None
    assert nodes.gone_on[0].continuation.choices == (
        ChoiceState((PROMPT[0],), 40, 1),
        ChoiceState((PROMPT[0],), None, 1),
        ChoiceState((), None, 0),
    )


@pytest.mark.parametrize("error", [EngineDead("restart"), Overloaded("full", retry_after_s=0.01), ValueError("a bug")])
async def test_a_failed_hop_goes_to_another_decode_node(tokenizer: Tokenizer, error: Exception) -> None:
    failing = FailsAfter(error, 1)
    async with running_nodes(tokenizer, [sharing], [failing, sharing]) as nodes:
        for first in range(10, 40):  # so many that some choose the node that fails
            prompt = [first, *PROMPT]
            generation = nodes.client.generate(token_ids=prompt, max_tokens=3)
            assert await generation.text() == f"<{first}>{expected(2)}"
            assert generation.decode_target == nodes.fronts[2].target
    assert len(nodes.decode[0].submitted) > 0
    assert all(request.continuation for request in nodes.gone_on)


async def test_a_decode_node_that_is_lost_later_is_gone_on_from(tokenizer: Tokenizer) -> None:
    failing = FailsAfter(EngineDead("restart"), 3, num_calls=1)
    async with running_nodes(tokenizer, [sharing], [failing]) as nodes:
        output = await nodes.client.generate(token_ids=PROMPT, max_tokens=6)
    assert (output.text, output.choices[0].token_ids) == (expected(6), tuple(PROMPT[:6]))
    assert output.choices[0].finished.usage.completion_tokens == 6
    assert nodes.gone_on[1].continuation is not None
    assert nodes.gone_on[1].continuation.choices == (ChoiceState(tuple(PROMPT[:3]), None, 3),)


@pytest.mark.parametrize("num_delivered", [0, 1, 2])
async def test_a_token_that_was_held_back_comes_once(tokenizer: Tokenizer, num_delivered: int) -> None:
    """However much a decode node has delivered when it is lost, the first token alone included."""
    failing = FailsAfter(EngineDead("restart"), 1 + num_delivered, num_calls=1)
    async with running_nodes(tokenizer, [holding_back], [failing]) as nodes:
        output = await nodes.client.generate(token_ids=PROMPT, max_tokens=6)
    assert (output.text, output.choices[0].token_ids) == (expected(6), tuple(PROMPT[:6]))
    delivered = ChoiceState(tuple(PROMPT[:num_delivered]), None, num_delivered)
    assert nodes.gone_on[1].continuation is not None
    assert nodes.gone_on[1].continuation.choices == (delivered if num_delivered else ChoiceState((PROMPT[0],), 40, 0),)


async def test_an_end_that_was_lost_with_its_node_is_no_answer(tokenizer: Tokenizer) -> None:
    """All tokens have come, but not why they ended: to go on would be wrong, and is refused."""
    failing = FailsAfter(EngineDead("restart"), 3, num_calls=1)
    async with running_nodes(tokenizer, [sharing], [failing]) as nodes:
        with pytest.raises(UnavailableError, match="restart"):
            await nodes.client.generate(token_ids=PROMPT, max_tokens=3)


async def test_attempts_are_bounded(tokenizer: Tokenizer) -> None:
    failing = FailsAfter(Overloaded("full", retry_after_s=0.01), 1)
    async with running_nodes(tokenizer, [sharing], [failing]) as nodes:
        with pytest.raises(OverloadedError):
            await nodes.client.generate(token_ids=PROMPT, max_tokens=3)
        assert len(nodes.gone_on) == QUICK.max_attempts
        nodes.decode[0].script = FailsAfter(ValueError("a bug"), 1)
        with pytest.raises(RequestFailedError):
            await nodes.client.generate(token_ids=PROMPT, max_tokens=3)
    assert len(nodes.gone_on) == QUICK.max_attempts + 1, "what one node breaks on is not tried there again"


async def test_what_the_request_is_to_blame_for_is_not_tried_again(tokenizer: Tokenizer) -> None:
    async with running_nodes(tokenizer, [sharing, sharing], [sharing]) as nodes:
        with pytest.raises(InvalidRequestError):
            await nodes.client.generate(token_ids=[*PROMPT, 512], max_tokens=3)
        nodes.prefill[0].script = nodes.prefill[1].script = FailsAfter(ValueError("a bug"), 1)
        with pytest.raises(RequestFailedError):
            await nodes.client.generate(token_ids=PROMPT, max_tokens=3)
    assert len(nodes.begun) == 1
    assert not nodes.gone_on


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("way", ["break", "cancel", "task"])
async def test_leaving_reaches_the_node_that_works(tokenizer: Tokenizer, phase: str, way: str) -> None:
    prefill, decode = (stopping_short, sharing) if phase == "prefill" else (sharing, stopping_short)
    async with running_nodes(tokenizer, [prefill], [decode]) as nodes:
        generation = nodes.client.generate(token_ids=PROMPT, max_tokens=5)
        num_deltas = 1 if phase == "prefill" else 5

        async def read() -> None:
            num_read = 0
            async for _ in generation:
                num_read += 1
                if num_read == num_deltas:
                    if way == "break":
                        break
                    if way == "cancel":
                        generation.cancel()

        engine = (nodes.prefill if phase == "prefill" else nodes.decode)[0]
        if way == "task":
            task = asyncio.create_task(read())
            await eventually(lambda: len(generation.output.choices) == 0 and bool(engine.live))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif way == "cancel":
            with pytest.raises(CancelledCallError):
                await read()
        else:
            await read()
        await eventually(lambda: not any(engine.live for engine in (*nodes.prefill, *nodes.decode)))
        if phase == "prefill":
            assert not nodes.gone_on
        await eventually(lambda: all(node.load == 0 for node in nodes.client._decode.nodes))


async def test_nothing_follows_a_cancellation_between_two_attempts(tokenizer: Tokenizer) -> None:
    failing = FailsAfter(Overloaded("full", retry_after_s=2.0), 1)
    async with running_nodes(tokenizer, [sharing], [failing]) as nodes:
        generation = nodes.client.generate(token_ids=PROMPT, max_tokens=5)
        reading = asyncio.create_task(generation.result())
        await eventually(lambda: bool(generation._failed))
        generation.cancel()
        with pytest.raises(CancelledCallError):
            await reading
    assert len(nodes.gone_on) == 1


async def test_a_deadline_ends_the_wait_for_a_node(tokenizer: Tokenizer) -> None:
    async with running_nodes(tokenizer, [sharing], [stopping_short]) as nodes:
        with pytest.raises(DeadlineExceededError):
            await nodes.client.generate(token_ids=PROMPT, max_tokens=5, timeout_s=0.3)


async def test_the_deadline_is_one_for_all_nodes(tokenizer: Tokenizer) -> None:
    async def taking_its_time(request: Request) -> AsyncIterator[StreamEvent]:
        async for event in sharing(request):
            yield event
        await asyncio.sleep(2.0)

    async with running_nodes(tokenizer, [taking_its_time], [sharing]) as nodes:
        await nodes.client.generate(token_ids=PROMPT, max_tokens=5, timeout_s=20)
    [begun], [gone_on] = nodes.begun, nodes.gone_on
    assert begun.deadline_s is not None
    assert gone_on.deadline_s is not None
    # 20 s from when it began, not from when it went on; on the wire a time is rounded up by as much as 3%.
    assert abs(gone_on.deadline_s - begun.deadline_s) < 1.2


async def test_one_trace_covers_all_nodes(tokenizer: Tokenizer) -> None:
    async with running_nodes(tokenizer, [sharing], [sharing]) as nodes:
        await nodes.client.generate(token_ids=PROMPT, max_tokens=3)
        await nodes.client.generate(token_ids=PROMPT[1:], max_tokens=3, metadata=[("traceparent", "00-aa-bb-00")])
        await eventually(lambda: all(len(front.calls()) == 2 for front in nodes.fronts))
        prefill, decode = ([call.metadata["traceparent"] for call in front.calls()] for front in nodes.fronts)
    assert prefill == decode
    assert prefill[1] == "00-aa-bb-00"


async def test_what_the_client_asks_for_itself_leaves_no_span(tokenizer: Tokenizer) -> None:
    """Each of them would be a trace of its own, once a second and node."""
    async with running_nodes(tokenizer, [sharing], [sharing]) as nodes:
        await nodes.client.generate(token_ids=PROMPT, max_tokens=3)
        await eventually(lambda: all(front.calls("GetStats") for front in nodes.fronts))
        asked = [call.metadata["traceparent"] for front in nodes.fronts for call in front.calls("GetStats")]
    assert all(re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", traceparent) for traceparent in asked)


async def test_a_node_that_came_back_is_found(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.nodes.REFRESH_S", 0.0)
    async with running_nodes(tokenizer, [sharing], [sharing]) as nodes:
        [node] = nodes.client._prefill.nodes
        node.is_up = False
        await nodes.client.generate(token_ids=PROMPT, max_tokens=3)
        assert not nodes.begun
        await eventually(lambda: node.is_up)
        await nodes.client.generate(token_ids=PROMPT[1:], max_tokens=3)
    assert len(nodes.begun) == 1


async def test_there_must_be_a_decode_node() -> None:
    with pytest.raises(ValueError, match="decode"):
        DisaggregatedClient(prefill=["127.0.0.1:1"], decode=[])


async def test_what_was_handed_on_in_vain_is_let_go(tokenizer: Tokenizer) -> None:
    async with running_nodes(tokenizer, [sharing], [FailsAfter(ValueError("a bug"), 1)]) as nodes:
        with pytest.raises(RequestFailedError):
            await nodes.client.generate(token_ids=PROMPT, max_tokens=5, request_id="failed")
        nodes.decode[0].script = stopping_short
        async for delta in nodes.client.generate(token_ids=PROMPT, max_tokens=5, request_id="read"):
            if delta.token_ids == (PROMPT[1],):
                break
        await eventually(lambda: nodes.prefill[0].released == ["failed"])


async def test_who_leaves_before_the_end_is_told_of_is_not_waited_for(tokenizer: Tokenizer) -> None:
    async with running_nodes(tokenizer, [stopping_short], [sharing]) as nodes:
        async for _ in nodes.client.generate(token_ids=PROMPT, max_tokens=5, request_id="left"):
            break
        await eventually(lambda: nodes.prefill[0].released == ["left"])


async def test_a_prefill_node_that_hangs_from_the_start_is_given_up_soon(tokenizer: Tokenizer) -> None:
    async with running_nodes(tokenizer, [sharing], [sharing]) as nodes, behind_gates(nodes) as (client, gates):
        next(iter(gates.values())).close(0)
        async with asyncio.timeout(50):
            generation = client.generate(token_ids=PROMPT, max_tokens=6)
            assert (await generation.result()).text == expected(6)
        assert generation.prefill_target is None


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_node_that_hangs_on_the_way_is_given_up_soon(tokenizer: Tokenizer, phase: str) -> None:
    prefill: list[Script] = [never_beginning if phase == "prefill" else sharing]
    decode: list[Script] = [sharing] if phase == "prefill" else [FirstStops()] * 2
    async with (
        running_nodes(tokenizer, prefill, decode) as nodes,
        behind_gates(nodes) as (client, gates),
        asyncio.timeout(50),
    ):
        generation = client.generate(token_ids=PROMPT, max_tokens=6)
        reading = asyncio.create_task(generation.result())
        await eventually(lambda: bool(nodes.begun if phase == "prefill" else nodes.gone_on))
        hanging = generation.prefill_target if phase == "prefill" else generation.decode_target
        assert hanging is not None
        gates[hanging].close(0)
        assert (await reading).text == expected(6)
        assert hanging not in (generation.prefill_target, generation.decode_target)


@pytest.mark.parametrize("hang_timeout_s", [0.0, 0.9])
def test_a_node_is_given_time_to_answer(hang_timeout_s: float) -> None:
    with pytest.raises(ValueError, match=f"hang_timeout_s must be at least 1, got {hang_timeout_s:g}"):
        DisaggregatedClient(prefill=(), decode=["a:1"], hang_timeout_s=hang_timeout_s)
