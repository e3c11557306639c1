"""Server processes that are killed, stopped and started again around a hop; KV goes from node to node."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Unpack

import grpc
import pytest

from clients.aio import AsyncClient
from clients.channel import CHANNEL_OPTIONS
from clients.errors import DeadlineExceededError, RequestFailedError, UnavailableError
from clients.progress import Progress
from clients.requests import GenerateOptions, generate_request
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1.inference_pb2_grpc import InferenceStub
from server.commands.bench_disaggregated_process import free_port
from tests.fakes.eventually import eventually
from tests.fakes.gate import Gate
from tests.fakes.hop import Hop, full_tokens, hop_between, ids, settle
from tests.fakes.hop_connectors import PEERS
from tests.fakes.relay import Relay
from tests.fakes.server_process import ServerProcess, server_processes
from tests.tiny_model import build_tiny_model

LENGTH = 480
NUM_FULL = full_tokens(LENGTH)
LEASE_S = 4.0
RELAY_HOST = "127.0.0.2"
HELD_BACK_AFTER = {"tcp": 64 << 10, "nixl": 400}
"""Bytes of a load, behind which it is far from its end: by NIXL no block goes this way, but what is said about it."""
GREEDY: GenerateOptions = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}


pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
numbers = count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("node-faults"))


@dataclass(frozen=True)
class Servers:
    """Attributes: strict: a decode node that fails what could not be loaded. kv_port: of the prefill node."""

    name: str
    kv_port: int
    prefill: ServerProcess
    decode: ServerProcess
    second: ServerProcess
    strict: ServerProcess


@pytest.fixture(scope="module", params=PEERS)
def started(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    name, kv_port = request.param, free_port()
    extra: dict[str, Any] = {"peer_timeout_seconds": 1.5, "lease_seconds": LEASE_S}
    if name == "nixl":
        extra |= {"transports": "tcp", "staging_bytes": 1 << 16}
    there = {**extra, "port": kv_port, "advertised_host": RELAY_HOST}

    def node(role: str, extra: dict[str, Any], policy: str = "recompute") -> dict[str, object]:
        config = {"kv_connector": name, "kv_connector_extra_config": extra, "kv_load_failure_policy": policy}
        return {"model": model, "role": role, "kv_transfer_config": config}

    settings = {
        "prefill": node("prefill", there),
        "decode": node("decode", extra),
        "second": node("decode", extra),
        "strict": node("decode", extra, "fail"),
    }
    with server_processes(tmp_path_factory.mktemp(name), settings) as servers:
        yield Servers(name=name, kv_port=kv_port, **servers)


class Scene:
    """Servers that all serve, and a gate between the prefill node's KV and whoever reads it."""

    def __init__(self, servers: Servers, alone: str, gate: Gate) -> None:
        self.servers = servers
        self.gate = gate
        self._alone = alone

    @asynccontextmanager
    async def hop(self, *decode: ServerProcess) -> AsyncIterator[Hop]:
        """The prefill node, and the decode node unless others are given; a first prompt has made the hop."""
        targets = [server.target for server in decode or [self.servers.decode]]
        async with hop_between([self.servers.prefill.target], targets) as hop:
            for node in (*hop.prefill, *hop.decode):
                await node.wait_ready(timeout_s=60)
            before = [await hop.counts(node) for node in hop.decode]
            await self.check(hop, self.fresh())
            after = [await hop.counts(node) for node in hop.decode]
            assert sum(new.loaded - old.loaded for old, new in zip(before, after, strict=True)) == NUM_FULL
            yield hop

    def fresh(self, **options: Unpack[GenerateOptions]) -> GenerateOptions:
        """One that nobody has seen before."""
        number = next(numbers)
        rng = random.Random(number)
        prompt = [rng.randrange(3, 500) for _ in range(LENGTH)]
        return {**GREEDY, "token_ids": prompt, "request_id": f"fault-{number}", **options}

    async def expected(self, request: GenerateOptions) -> list[tuple[int, ...]]:
        """What one node says."""
        async with AsyncClient(self._alone) as client:
            return ids(await client.generate(**request))

    async def check(self, hop: Hop, request: GenerateOptions) -> None:
        """Two nodes say the same."""
        assert ids(await hop.client.generate(**request)) == await self.expected(request)

    async def held_back(self, hop: Hop, request: GenerateOptions) -> "asyncio.Task[None]":
        """Begin a request whose load comes to a halt half-way. Returns: its check."""
        self.gate.close(HELD_BACK_AFTER[self.servers.name])
        task = asyncio.create_task(self.check(hop, request))
        assert await asyncio.to_thread(self.gate.reached.wait, 30.0)
        return task

    async def others_go_on(self, node: AsyncClient) -> None:
        """The node is healthy, and a stream of its own is what it always is."""
        await node.wait_ready(timeout_s=60)
        request = self.fresh(token_ids=[5, 6, next(numbers)])
        assert ids(await node.generate(**request)) == await self.expected(request)


@pytest.fixture
def scene(started: Servers, alone: str) -> Iterator[Scene]:
    gate = Gate()
    relay = Relay(f"127.0.0.1:{started.kv_port}", gate, at=(RELAY_HOST, started.kv_port))
    yield Scene(started, alone, gate)
    gate.open()
    relay.close()
    for server in (started.prefill, started.decode, started.second, started.strict):
        server.revive()


async def begun(target: str, request: GenerateOptions) -> tuple[list[int], pb.GenerateRequest]:
    """Have a prefill node begin. Returns: what it has generated, and the request to go on with."""
    progress = Progress(generate_request(None, request))
    return await tokens(target, progress.first_request(), progress), progress.continuation()


async def tokens(target: str, request: pb.GenerateRequest, progress: Progress | None = None) -> list[int]:
    """What a node generates."""
    found: list[int] = []
    async with grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        async for message in InferenceStub(channel).Generate(request):
            found += message.delta.token_ids
            if progress is not None:
                progress.take_in(message)
    return found


async def test_a_prefill_node_that_is_killed_before_it_answers(scene: Scene) -> None:
    async with scene.hop() as hop:
        scene.servers.prefill.signal(signal.SIGSTOP)
        request = scene.fresh()
        generation = hop.client.generate(**request)
        reading = asyncio.create_task(generation.result())
        await scene.others_go_on(hop.decode[0])
        assert not reading.done()
        scene.servers.prefill.kill()
        assert ids(await reading) == await scene.expected(request)
        assert generation.prefill_target is None
        await settle(hop.decode[0])
    scene.servers.prefill.start()
    async with scene.hop() as hop:
        await hop.settle()


async def test_a_prefill_node_that_is_stopped_before_it_answers(scene: Scene) -> None:
    """A deadline ends the wait for it; without one it is given up, and the decode node does all of it."""
    targets = [[server.target] for server in (scene.servers.prefill, scene.servers.decode)]
    async with scene.hop() as hop, hop_between(*targets, hang_timeout_s=4.0) as impatient:
        scene.servers.prefill.signal(signal.SIGSTOP)
        with pytest.raises(DeadlineExceededError):
            await hop.client.generate(**scene.fresh(), timeout_s=2.0)
        await scene.others_go_on(hop.decode[0])
        request = scene.fresh()
        generation = impatient.client.generate(**request)
        assert ids(await generation) == await scene.expected(request)
        assert generation.prefill_target is None
        scene.servers.prefill.signal(signal.SIGCONT)
        await hop.settle()
    async with scene.hop() as hop:
        await hop.settle()


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_prefill_node_that_is_lost_during_a_transfer(scene: Scene, fate: signal.Signals) -> None:
    async with scene.hop() as hop:
        before, request = await hop.counts(), scene.fresh()
        task = await scene.held_back(hop, request)
        scene.servers.prefill.signal(fate)
        await scene.others_go_on(hop.decode[0])
        assert not task.done()
        if fate is signal.SIGKILL:
            scene.gate.open(loses=True)
        await task
        counts = await hop.counts() - before
        assert (counts.failed_loads, counts.loaded < NUM_FULL) == (1, True)
        scene.gate.open()
        await settle(hop.decode[0])
    scene.servers.prefill.revive()
    async with scene.hop() as hop:
        await hop.settle()


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
async def test_by_policy_a_transfer_that_fails_is_an_error(scene: Scene, fate: signal.Signals) -> None:
    async with scene.hop(scene.servers.strict) as hop:
        task = await scene.held_back(hop, scene.fresh())
        scene.servers.prefill.signal(fate)
        if fate is signal.SIGKILL:
            scene.gate.open(loses=True)
        with pytest.raises(RequestFailedError, match="could not be loaded"):
            await task
        scene.gate.open()
        await scene.others_go_on(hop.decode[0])
        await settle(hop.decode[0])


async def test_a_prefill_node_that_is_killed_after_the_transfer(scene: Scene) -> None:
    async with scene.hop() as hop:
        before, request = await hop.counts(), scene.fresh()
        generation = hop.client.generate(**request)
        num_tokens = 0
        async for delta in generation:
            num_tokens += len(delta.token_ids)
            if num_tokens > 1:
                scene.servers.prefill.kill()
        assert ids(generation.output) == await scene.expected(request)
        counts = await hop.counts() - before
        assert (counts.failed_loads, counts.loaded) == (0, NUM_FULL)
        await settle(hop.decode[0])


async def test_a_handle_of_a_node_that_was_started_again(scene: Scene) -> None:
    async with scene.hop() as hop:
        before, request = await hop.counts(), scene.fresh()
        first, continuation = await begun(scene.servers.prefill.target, request)
        scene.servers.prefill.kill()
        scene.servers.prefill.revive()
        rest = await tokens(scene.servers.decode.target, continuation)
        assert [(*first, *rest)] == await scene.expected(request)
        assert (await hop.counts() - before).loaded == 0
        await settle(hop.decode[0])
    async with scene.hop() as hop:
        await hop.settle()


async def test_a_prefill_node_that_is_told_to_stop_waits_for_who_reads(scene: Scene) -> None:
    """The decode node would fail what it cannot load."""
    async with scene.hop() as hop:
        await hop.settle()
        request = scene.fresh()
        first, continuation = await begun(scene.servers.prefill.target, request)
        scene.servers.prefill.stop()
        await eventually(lambda: f"others may read {NUM_FULL // 16} KV blocks" in scene.servers.prefill.log)
        rest = await tokens(scene.servers.strict.target, continuation)
        assert [(*first, *rest)] == await scene.expected(request)
        await eventually(lambda: scene.servers.prefill.log.rstrip().endswith("stopped"))
        scene.servers.prefill.close()  # not before, as a second signal ends it at once


async def test_a_handle_whose_lease_has_ended(scene: Scene) -> None:
    async with scene.hop() as hop:
        await hop.settle()
        before, request = await hop.counts(), scene.fresh()
        first, continuation = await begun(scene.servers.prefill.target, request)
        assert (await hop.prefill[0].stats()).num_held_blocks == NUM_FULL // 16
        await settle(hop.prefill[0])
        rest = await tokens(scene.servers.decode.target, continuation)
        assert [(*first, *rest)] == await scene.expected(request)
        counts = await hop.counts() - before
        assert (counts.failed_loads, counts.loaded) == (1, 0)
        await hop.settle()


async def test_a_decode_node_that_is_killed_while_a_lease_is_held(scene: Scene) -> None:
    async with scene.hop() as hop:
        task = await scene.held_back(hop, scene.fresh())
        scene.servers.decode.kill()
        with pytest.raises(UnavailableError):
            await task
        scene.gate.open()
        await settle(hop.prefill[0])


async def test_another_decode_node_takes_over_a_lease(scene: Scene) -> None:
    nodes = {server.target: server for server in (scene.servers.decode, scene.servers.second)}
    async with scene.hop(*nodes.values()) as hop:
        scene.gate.close(HELD_BACK_AFTER[scene.servers.name])
        request = scene.fresh()
        generation = hop.client.generate(**request)
        reading = asyncio.create_task(generation.result())
        assert await asyncio.to_thread(scene.gate.reached.wait, 30.0)
        assert generation.decode_target is not None
        nodes.pop(generation.decode_target).kill()
        scene.gate.open()
        assert ids(await reading) == await scene.expected(request)
        assert generation.decode_target in nodes
        await settle(hop.prefill[0])
        for target in nodes:
            async with AsyncClient(target) as node:
                await scene.others_go_on(node)
                await settle(node)
