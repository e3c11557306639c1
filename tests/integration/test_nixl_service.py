"""What a node tells those that read from it, and what it believes of those that it reads from."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import grpc
import pytest
import torch
from google.protobuf.message import Message

import connectors.nixl.peer
from connectors.base import ConnectorContext, KVCaches, KVGroup
from connectors.nixl.agent import NixlAgent, NixlFailed, PeerLost
from connectors.nixl.connector import NixlConfig
from connectors.nixl.link import MAX_UNSAFE
from connectors.nixl.peer import NixlPeer
from connectors.peer.leases import LEASE_NBYTES
from protos.outrider.v1 import block_exchange_pb2 as pb
from protos.outrider.v1.block_exchange_pb2_grpc import BlockExchangeStub
from server.errors import ConfigError
from tests.fakes.kv_node import KVNode
from tests.fakes.thread_watch import no_thread_is_left

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")

SETTINGS: dict[str, Any] = {"connector": "nixl", "transports": "tcp"}
UNKNOWN = "0" * 2 * LEASE_NBYTES


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with no_thread_is_left(), ExitStack() as opened:
        yield opened


@pytest.fixture
def holder(stack: ExitStack) -> KVNode:
    """A node with blocks."""
    made = KVNode(**SETTINGS, engine_id="holder", draft="d")
    stack.callback(made.close)
    made.fill(1)
    return made


@pytest.fixture
def reader(stack: ExitStack) -> KVNode:
    """A node that wants some."""
    made = KVNode(**SETTINGS, engine_id="reader", draft="d")
    stack.callback(made.close)
    return made


@pytest.fixture
def stub(stack: ExitStack, holder: KVNode) -> BlockExchangeStub:
    """Whoever has found the port of the one with blocks."""
    channel = stack.enter_context(grpc.insecure_channel(holder.hand_on(15).address))
    return BlockExchangeStub(channel)


@contextmanager
def refused(code: grpc.StatusCode, reason: str) -> Iterator[None]:
    """The call fails with this code, for this reason."""
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert caught.value.code() == code
    assert reason in (caught.value.details() or "")


def test_another_engine_and_another_version_are_refused(stub: BlockExchangeStub) -> None:
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "version 9 was asked for, this node has 1"):
        stub.Greet(pb.GreetRequest(version=9, engine_id="holder"))
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "engine other was asked for, this one is holder"):
        stub.Greet(pb.GreetRequest(version=1, engine_id="other"))


def test_blocks_are_those_of_the_lease(stub: BlockExchangeStub, holder: KVNode) -> None:
    lease_id = holder.hand_on(3, 9, 4).lease_id
    last_hash = holder.request(3).hashes[-1]
    located = stub.Locate(pb.LocateRequest(lease_id=lease_id, first=1, count=2, last_hash=last_hash))
    assert list(located.block_ids) == [9, 4]
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "blocks 1 to 4 are wanted, the lease has 3"):
        stub.Locate(pb.LocateRequest(lease_id=lease_id, first=1, count=3))
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "blocks 1 to 1 are wanted"):
        stub.Locate(pb.LocateRequest(lease_id=lease_id, first=1, count=0))
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "the lease has 3"):
        stub.Locate(pb.LocateRequest(lease_id=lease_id, first=2**32 - 1, count=2**32 - 1))
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "other tokens"):
        stub.Locate(pb.LocateRequest(lease_id=lease_id, first=0, count=2, last_hash=last_hash))


def test_without_a_lease_there_is_nothing(stub: BlockExchangeStub) -> None:
    for lease_id in (UNKNOWN, "", "é" * 1000):
        with refused(grpc.StatusCode.NOT_FOUND, "no lease"):
            stub.Locate(pb.LocateRequest(lease_id=lease_id, first=0, count=1))
        with refused(grpc.StatusCode.NOT_FOUND, "no lease"):
            stub.Check(pb.CheckRequest(lease_id=lease_id, first=0, count=1, groups=[0], checksum=pb.CHECKSUM_XXH3))
        stub.Keep(pb.KeepRequest(kept=[lease_id], released=[lease_id]))


@pytest.mark.parametrize("groups", [[2], [0, 0], [0, 1, 2**32 - 1]])
def test_groups_that_a_node_does_not_have(stub: BlockExchangeStub, holder: KVNode, groups: list[int]) -> None:
    request = pb.CheckRequest(
        lease_id=holder.hand_on(1).lease_id, first=0, count=1, groups=groups, checksum=pb.CHECKSUM_XXH3
    )
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "are not those of this node"):
        stub.Check(request)


def test_a_checksum_has_to_be_chosen(stub: BlockExchangeStub, holder: KVNode) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "unknown checksum"):
        stub.Check(pb.CheckRequest(lease_id=holder.hand_on(1).lease_id, first=0, count=1, groups=[0]))


@contextmanager
def answers(change: Callable[[Message], None]) -> Iterator[None]:
    """Every answer that a reader gets is changed."""

    def changed(*arguments: Any) -> Message:
        answer: Message = result(*arguments)
        change(answer)
        return answer

    result = connectors.nixl.peer._result
    with patch.object(connectors.nixl.peer, "_result", changed):
        yield


WRONG_GREETINGS: dict[str, dict[str, Any]] = {
    "no tokens": {"block_size": 0},
    "no groups": {"groups": []},
    "no blocks": {"num_blocks": 0},
    "a block of nothing": {"block_nbytes": 0},
    "blocks that overlap": {"stride": 8},
    "another length": {"block_nbytes": 8},
    "another type": {"dtype": "float16"},
    "another shape": {"shape": [1, 2, 4, 8]},
    "what is no agent": {"agent_metadata": b"rubbish"},
}


@pytest.mark.parametrize("values", WRONG_GREETINGS.values(), ids=list(WRONG_GREETINGS))
def test_a_node_that_says_what_can_not_be(reader: KVNode, holder: KVNode, values: dict[str, Any]) -> None:
    def lie(answer: Message) -> None:
        if not isinstance(answer, pb.GreetResponse):
            return
        for name, value in values.items():
            if name == "groups":
                del answer.groups[:]
            elif name == "shape":
                answer.groups[0].shape[:] = value
            else:
                setattr(answer if name in answer.DESCRIPTOR.fields_by_name else answer.groups[0], name, value)

    with answers(lie):
        assert reader.wait_for_load(reader.begin(holder.hand_on(3, 4), 1, 2)) == {1, 2}
    assert not reader.blocks.any()
    assert reader.wait_for_load(reader.begin(holder.hand_on(3, 4), 1, 2)) == frozenset(), "it was not taken for true"


def test_a_node_of_another_version_is_not_read_from(
    reader: KVNode, holder: KVNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("connectors.nixl.server.VERSION", 2)
    assert reader.wait_for_load(reader.begin(holder.hand_on(3, 4), 1, 2)) == {1, 2}
    assert "version 1 was asked for, this node has 2" in caplog.text
    assert not reader.blocks.any()


@pytest.mark.parametrize("kind", [pb.LocateResponse, pb.CheckResponse])
def test_fewer_blocks_or_checksums_than_were_asked_for(reader: KVNode, holder: KVNode, kind: type[Message]) -> None:
    def lie(answer: Message) -> None:
        if isinstance(answer, kind):
            del next(iter(answer.ListFields()))[1][1:]

    with answers(lie):
        assert reader.wait_for_load(reader.begin(holder.hand_on(3, 4), 1, 2)) == {1, 2}
    assert not reader.blocks.any()


def test_a_block_that_the_node_does_not_have(reader: KVNode, holder: KVNode) -> None:
    def lie(answer: Message) -> None:
        if isinstance(answer, pb.LocateResponse):
            answer.block_ids[0] = 16

    with answers(lie):
        assert reader.wait_for_load(reader.begin(holder.hand_on(3, 4), 1, 2)) == {1, 2}


@contextmanager
def failing_reads(error: NixlFailed) -> Iterator[None]:
    """Every read fails once it has begun."""
    follow = NixlAgent._follow

    def fail(self: NixlAgent, nixl: object, read: Any, _: object) -> None:
        def broken(_: object) -> str:
            raise error

        follow(self, nixl, read, broken)

    with patch.object(NixlAgent, "_follow", fail):
        yield


@pytest.mark.parametrize("error", [NixlFailed("odd"), PeerLost("gone")])
def test_after_a_read_has_failed_the_node_is_greeted_again(reader: KVNode, holder: KVNode, error: NixlFailed) -> None:
    with failing_reads(error):
        assert reader.wait_for_load(reader.begin(holder.hand_on(3, 4), 1, 2)) == {1, 2}
    with patch.object(NixlPeer, "greet", autospec=True, side_effect=NixlPeer.greet) as greeted:
        for _ in range(2):
            assert reader.wait_for_load(reader.begin(holder.hand_on(3, 4), 1, 2)) == frozenset()
    assert greeted.call_count == 1
    assert torch.equal(reader.blocks[1:3], holder.blocks[3:5])


def test_a_node_that_costs_memory_is_left_alone(reader: KVNode, holder: KVNode) -> None:
    with patch.object(NixlAgent, "keep", autospec=True, side_effect=NixlAgent.keep) as kept:
        with failing_reads(NixlFailed("odd")):
            for _ in range(MAX_UNSAFE + 5):
                assert reader.wait_for_load(reader.begin(holder.hand_on(3, 4), 1, 2)) == {1, 2}
        assert reader.wait_for_load(reader.begin(holder.hand_on(3, 4), 1, 2)) == {1, 2}
    assert kept.call_count == MAX_UNSAFE + 1


def test_devices_that_there_are_not(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")  # what is set now comes back in the end
    context = ConnectorContext("nixl", "a", 4, "f", lambda: None, time.monotonic)
    worker = NixlConfig(net_devices="no-such-device").build(context).worker
    with pytest.raises(ConfigError, match="net_devices no-such-device"):
        worker.register_kv_caches(KVCaches((KVGroup("target", "f", torch.zeros(2, 1, 1, 4, 2)),), 4))
    worker.shutdown(1.0)


def test_a_port_that_is_taken(holder: KVNode) -> None:
    port = int(holder.hand_on(1).address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"KV can not be served at 127.0.0.1:{port}"):
        KVNode(**SETTINGS, port=port)


def test_a_device_setting_of_the_environment_holds(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "self")
    with pytest.raises(ConfigError, match="UCX_TLS: must leave tcp in"):
        KVNode(connector="nixl")
