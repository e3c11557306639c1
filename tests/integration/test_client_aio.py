"""The asyncio client against a real server: leaving, retrying, waiting."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from clients.aio import AsyncClient
from clients.errors import (
    CancelledCallError,
    DeadlineExceededError,
    OverloadedError,
    RequestFailedError,
    UnavailableError,
)
from clients.retry import RetryPolicy
from server.engine.protocol import Delta, StreamEvent
from server.errors import EngineDead, Overloaded
from server.request import Request
from server.tokenizer import Tokenizer
from tests.fakes.eventually import eventually
from tests.fakes.front import NO_RETRY, Front, running_front, tiny_model_info
from tests.fakes.scripted_engine import ScriptedEngine, echo, finished
from tests.fakes.scripted_server import ScriptedServer, running_script

CANCELLED = grpc.StatusCode.CANCELLED
QUICK = RetryPolicy(max_attempts=3, initial_backoff_s=0.01)


class Failing:
    """A script that fails so many times, before or after a first token, then echoes."""

    def __init__(self, error: Exception, num_failures: int, *, has_token: bool = False) -> None:
        self.error = error
        self.num_failures = num_failures
        self.has_token = has_token
        self.num_calls = 0

    async def __call__(self, request: Request) -> AsyncIterator[StreamEvent]:
        self.num_calls += 1
        if self.num_calls > self.num_failures:
            async for event in echo(request):
                yield event
            return
        if self.has_token:
            yield Delta(0, "a", (1,))
        raise self.error


async def endless(request: Request) -> AsyncIterator[StreamEvent]:
    yield Delta(0, "a", (1,))
    await asyncio.Event().wait()
    yield finished(request, 1)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(tiny_model_info(), endless)


@pytest.fixture
async def front(engine: ScriptedEngine, tokenizer: Tokenizer) -> AsyncIterator[Front]:
    async with running_front(engine, tokenizer) as running:
        yield running


@pytest.fixture
async def client(front: Front) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(front.target, retry=QUICK) as client:
        yield client


@pytest.mark.parametrize("error", [EngineDead("restart"), Overloaded("full", retry_after_s=0.01)])
async def test_retries_before_the_first_token(client: AsyncClient, engine: ScriptedEngine, error: Exception) -> None:
    engine.script = script = Failing(error, 2)
    assert await client.generate(token_ids=[7], max_tokens=2).text() == "<7><7>"
    assert script.num_calls == 3


async def test_retries_are_bounded(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = script = Failing(Overloaded("full", retry_after_s=0.01), 9)
    with pytest.raises(OverloadedError):
        await client.generate(token_ids=[7], max_tokens=2)
    assert script.num_calls == 3


async def test_never_retries_after_the_first_token(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = script = Failing(EngineDead("restart"), 1, has_token=True)
    with pytest.raises(UnavailableError):
        await client.generate(token_ids=[7], max_tokens=2)
    assert script.num_calls == 1


async def test_never_retries_what_would_fail_again(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = script = Failing(ValueError("a bug"), 1)
    with pytest.raises(RequestFailedError):
        await client.generate(token_ids=[7], max_tokens=2)
    assert script.num_calls == 1


async def test_leaving_in_every_way_ends_the_request(client: AsyncClient, front: Front) -> None:
    async def leave_by_break() -> None:
        async for _ in client.generate("hi"):
            break

    async def leave_by_error() -> None:
        async def read() -> None:
            async for _ in client.generate("hi"):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await read()

    async def leave_by_context() -> None:
        async with client.generate("hi") as generation:
            await anext(aiter(generation))

    async def leave_by_aclose() -> None:
        generation = client.generate("hi")
        deltas = aiter(generation)
        await anext(deltas)
        await generation.aclose()
        with pytest.raises(CancelledCallError):
            await anext(deltas)

    async def leave_by_cancelled_task() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in client.generate("hi"):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def leave_by_timeout_scope() -> None:
        scope = asyncio.timeout(None)

        async def read() -> None:
            async for _ in client.generate("hi"):
                scope.reschedule(asyncio.get_running_loop().time())

        with pytest.raises(TimeoutError):
            async with scope:
                await read()

    ways = (
        leave_by_break,
        leave_by_error,
        leave_by_context,
        leave_by_aclose,
        leave_by_cancelled_task,
        leave_by_timeout_scope,
    )
    for num_left, leave in enumerate(ways, start=1):
        await leave()
        await eventually(lambda count=num_left: len(front.calls()) == count)  # type: ignore[misc]
    assert {call.status for call in front.calls()} == {"CANCELLED"}


async def test_a_deadline_bounds_all_attempts(client: AsyncClient, engine: ScriptedEngine) -> None:
    with pytest.raises(DeadlineExceededError):
        await client.generate("hi", timeout_s=0.1)
    engine.script = script = Failing(Overloaded("full", retry_after_s=4.9), 9)
    with pytest.raises(OverloadedError):
        await client.generate("hi", timeout_s=4.8)
    assert script.num_calls == 1


async def test_a_call_that_the_server_cancels_is_one_for_another_attempt() -> None:
    """What gRPC makes of a call that comes while the server stops, and may be CANCELLED."""
    async with running_script(ScriptedServer(refusals={0: CANCELLED, 2: CANCELLED})) as script:
        async with AsyncClient(script.address, retry=QUICK) as client:
            assert await client.generate("hi").text() == "xxx"
        async with AsyncClient(script.address, retry=NO_RETRY) as client:
            with pytest.raises(UnavailableError, match="the server ended the call: refused by the script") as caught:
                await client.generate("hi")
    assert caught.value.code == CANCELLED


async def test_no_server_is_unavailable(unused_tcp_port: int) -> None:
    async with AsyncClient(f"127.0.0.1:{unused_tcp_port}", retry=QUICK) as client:
        with pytest.raises(UnavailableError):
            await client.generate("hi")
        with pytest.raises(UnavailableError):
            await client.stats()
        with pytest.raises(DeadlineExceededError, match=rf"{unused_tcp_port} was not ready within 2 s: .*refused"):
            await client.wait_ready(timeout_s=2)


async def test_wait_ready_waits_for_a_server_to_come(
    engine: ScriptedEngine, tokenizer: Tokenizer, unused_tcp_port: int
) -> None:
    async with AsyncClient(f"127.0.0.1:{unused_tcp_port}") as client:
        waiting = asyncio.create_task(client.wait_ready(timeout_s=60))
        with pytest.raises(UnavailableError):
            await client.stats()
        async with running_front(engine, tokenizer, port=unused_tcp_port):
            await waiting
