"""What the server listens on, what it says of its health, and how it stops."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from clients.aio import AsyncClient
from clients.errors import DeadlineExceededError, UnavailableError
from server.config import ServerConfig
from server.engine.protocol import Delta, StreamEvent
from server.errors import ConfigError
from server.events import EventBus
from server.preprocess import Preprocessor
from server.request import Request
from server.rpc.lifecycle import SERVICE_NAME, GrpcServer
from server.tokenizer import Tokenizer
from tests.fakes.eventually import eventually
from tests.fakes.front import running_front, tiny_model_info
from tests.fakes.scripted_engine import ScriptedEngine, finished

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


def make_server(tokenizer: Tokenizer, engine: ScriptedEngine, **settings: object) -> GrpcServer:
    config = ServerConfig.model_validate({"port": 0, "shutdown_timeout_seconds": 60, **settings})
    return GrpcServer(config, engine, Preprocessor(tokenizer, engine.model_info), EventBus())


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(tiny_model_info())


class Gate:
    """A script that gives one token, and the end once opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def __call__(self, request: Request) -> AsyncIterator[StreamEvent]:
        yield Delta(0, "first", (1,))
        await self.opened.wait()
        yield Delta(0, " last", (2,))
        yield finished(request, 2)


@pytest.mark.parametrize("service", ["", SERVICE_NAME])
async def test_health_follows_the_server(tokenizer: Tokenizer, engine: ScriptedEngine, service: str) -> None:
    engine.script = gate = Gate()
    server = make_server(tokenizer, engine)
    target = f"127.0.0.1:{await server.start()}"
    async with grpc.aio.insecure_channel(target) as channel, AsyncClient(target) as client:
        request = health_pb2.HealthCheckRequest(service=service)
        assert (await HealthStub(channel).Check(request)).status == NOT_SERVING
        watch = HealthStub(channel).Watch(request)
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(DeadlineExceededError):
            await client.wait_ready(timeout_s=0.1)
        await server.set_serving()
        assert (await watch.read()).status == SERVING
        await client.wait_ready(timeout_s=60)

        generation = client.generate("hi")
        deltas = aiter(generation)
        assert (await anext(deltas)).text == "first"
        stopping = asyncio.create_task(server.stop())
        assert (await watch.read()).status == NOT_SERVING, "while a request is live"
        gate.opened.set()
        assert [delta.text async for delta in deltas] == [" last"]
        assert generation.finished[0].finish_reason == "length"
        async with asyncio.timeout(30):
            await stopping  # The watch is still open, and does not hold the server up.


async def test_no_new_calls_while_stopping(tokenizer: Tokenizer, engine: ScriptedEngine) -> None:
    engine.script = gate = Gate()
    async with running_front(engine, tokenizer, shutdown_timeout_seconds=60) as front:
        deltas = aiter(front.client.generate("hi"))
        await anext(deltas)
        stopping = asyncio.create_task(front.server.stop())
        await asyncio.sleep(0)  # Its first step closes the door.
        with pytest.raises(UnavailableError):
            await front.client.generate("hi")
        gate.opened.set()
        assert [delta.text async for delta in deltas] == [" last"]
        await stopping


async def test_requests_that_outlast_the_timeout_are_cancelled(tokenizer: Tokenizer, engine: ScriptedEngine) -> None:
    engine.script = Gate()
    async with running_front(engine, tokenizer, shutdown_timeout_seconds=0.05) as front:
        await anext(aiter(front.client.generate("hi", request_id="long")))
        await front.server.stop()
        await eventually(lambda: not engine.live)
        assert "long" in engine.abort_calls


async def test_reflection_lists_the_services(tokenizer: Tokenizer, engine: ScriptedEngine) -> None:
    def services(target: str) -> set[str]:
        with grpc.insecure_channel(target) as channel:
            return set(ProtoReflectionDescriptorDatabase(channel).get_services())

    async with running_front(engine, tokenizer) as front:
        found = await asyncio.to_thread(services, front.target)
    assert found == {SERVICE_NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_a_unix_socket_serves_and_goes(tokenizer: Tokenizer, engine: ScriptedEngine, tmp_path: Path) -> None:
    path = tmp_path / "outrider.sock"
    async with running_front(engine, tokenizer, uds=str(path)) as front:
        assert front.target == f"unix:{path}"
        assert await front.client.generate(token_ids=[3], max_tokens=1).text() == "<3>"
        with pytest.raises(ConfigError, match="another server listens there"):
            await make_server(tokenizer, engine, uds=str(path)).start()
        assert await front.client.generate(token_ids=[3], max_tokens=1).text() == "<3>"
    assert not path.exists()


async def test_a_socket_left_behind_is_replaced_but_no_file(
    tokenizer: Tokenizer, engine: ScriptedEngine, tmp_path: Path
) -> None:
    path = tmp_path / "outrider.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    async with running_front(engine, tokenizer, uds=str(path)) as front:
        assert await front.client.generate(token_ids=[3], max_tokens=1).text() == "<3>"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        await make_server(tokenizer, engine, uds=str(path)).start()
    assert path.read_text() == "precious"


async def test_a_port_in_use_is_a_config_error(tokenizer: Tokenizer, engine: ScriptedEngine) -> None:
    async with running_front(engine, tokenizer) as front:
        port = front.target.rpartition(":")[2]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await make_server(tokenizer, engine, port=int(port)).start()


async def test_an_ipv6_address_is_bracketed(tokenizer: Tokenizer, engine: ScriptedEngine) -> None:
    server = make_server(tokenizer, engine, host="::1")
    port = await server.start()
    async with AsyncClient(f"[::1]:{port}") as client:
        assert (await client.model_info()).served_model_name == "tiny"
    await server.stop()
