"""The blocking client, in a thread beside the server's loop."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from clients.errors import (
    CancelledCallError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from clients.retry import RetryPolicy
from clients.sync import Client
from server.engine.protocol import Delta, StreamEvent
from server.request import Request
from server.tokenizer import Tokenizer
from tests.fakes.eventually import eventually
from tests.fakes.front import NO_RETRY, Front, running_front, tiny_model_info
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.scripted_server import ScriptedServer, running_script

CANCELLED = grpc.StatusCode.CANCELLED
QUICK = RetryPolicy(max_attempts=2, initial_backoff_s=0.01)


async def endless(request: Request) -> AsyncIterator[StreamEvent]:
    yield Delta(0, "a", (1,))
    await asyncio.Event().wait()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(tiny_model_info())


@pytest.fixture
async def front(engine: ScriptedEngine, tokenizer: Tokenizer) -> AsyncIterator[Front]:
    async with running_front(engine, tokenizer) as running:
        yield running


async def test_every_call(front: Front) -> None:
    def use() -> None:
        with Client(front.target) as client:
            client.wait_ready(timeout_s=60)
            generation = client.generate(token_ids=[5, 6], max_tokens=3, n=2)
            texts = {0: "", 1: ""}
            for delta in generation:
                texts[delta.index] += delta.text
            assert texts == {0: "<5><6><5>", 1: "<5><6><5>"}
            assert [choice.text for choice in generation.output.choices] == list(texts.values())
            assert generation.started is not None
            assert set(generation.finished) == {0, 1}
            assert client.generate(messages=[{"role": "user", "content": "hi"}], max_tokens=1).text() == "<1>"
            assert client.detokenize(client.tokenize("The dog")) == "The dog"
            assert client.abort("nobody") == {"nobody": False}
            assert client.model_info().served_model_name == "tiny"
            assert client.stats().kv_blocks_total == 64

    await asyncio.to_thread(use)


async def test_errors_are_typed(front: Front, engine: ScriptedEngine) -> None:
    def use() -> None:
        with Client(front.target, retry=QUICK) as client:
            with pytest.raises(InvalidRequestError) as caught:
                client.generate("hi", top_p=0.0).text()
            assert caught.value.violations[0].field == "sampling.top_p"
            with pytest.raises(InvalidRequestError):
                client.detokenize([512])
            with pytest.raises(DeadlineExceededError):
                client.generate("hi", timeout_s=0.1).text()
            engine.max_live = 0
            with pytest.raises(OverloadedError):
                client.generate("hi", request_id="crowded out").text()

    engine.script = endless
    await asyncio.to_thread(use)
    # A call is recorded once it is over, which its client may learn first.
    await eventually(
        lambda: (
            [call.status for call in front.calls() if call.request_id == "crowded out"] == ["RESOURCE_EXHAUSTED"] * 2
        )
    )


async def test_leaving_in_every_way_ends_the_request(front: Front, engine: ScriptedEngine) -> None:
    def use() -> None:
        with Client(front.target) as client:
            for _ in client.generate("hi"):
                break
            with client.generate("hi") as generation:
                next(iter(generation))
            deltas = iter(client.generate("hi"))
            next(deltas)

    engine.script = endless
    await asyncio.to_thread(use)
    await eventually(lambda: len(front.calls()) == 3)
    assert {call.status for call in front.calls()} == {"CANCELLED"}
    assert not engine.live


async def test_only_what_the_caller_cancels_is_cancelled(front: Front, engine: ScriptedEngine) -> None:
    def use() -> None:
        client = Client(front.target)
        left = client.generate("hi")
        deltas = iter(left)
        next(deltas)
        left.cancel()
        with pytest.raises(CancelledCallError):
            next(deltas)
        deltas = iter(client.generate("hi"))
        next(deltas)
        client.close()
        with pytest.raises(CancelledCallError):
            next(deltas)

    engine.script = endless
    await asyncio.to_thread(use)


async def test_a_call_that_the_server_cancels_is_one_for_another_attempt() -> None:
    """What gRPC makes of a call that comes while the server stops, and may be CANCELLED."""

    def use() -> None:
        with Client(script.address, retry=QUICK) as client:
            assert client.generate("hi").text() == "xxx"
        with Client(script.address, retry=NO_RETRY) as client:
            with pytest.raises(UnavailableError, match="the server ended the call: refused by the script") as caught:
                client.generate("hi").text()
            assert caught.value.code == CANCELLED

    async with running_script(ScriptedServer(refusals={0: CANCELLED, 2: CANCELLED})) as script:
        await asyncio.to_thread(use)


def test_no_server_is_unavailable(unused_tcp_port: int) -> None:
    with Client(f"127.0.0.1:{unused_tcp_port}", retry=QUICK) as client:
        with pytest.raises(UnavailableError):
            client.generate("hi").text()
        with pytest.raises(UnavailableError):
            client.stats()
        with pytest.raises(DeadlineExceededError, match=rf"{unused_tcp_port} was not ready within 2 s: .*refused"):
            client.wait_ready(timeout_s=2)
