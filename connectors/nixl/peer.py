"""Another node's answers to what is asked before and after its blocks are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from connectors.nixl.memory import MAX_BLOCKS, Place, Region
from connectors.peer.address import PeerAddress
from connectors.peer.layout import MAX_GROUPS, GroupLayout, NodeLayout
from connectors.waiting import Awaited, Waiting
from protos.outrider.v1 import block_exchange_pb2 as pb
from protos.outrider.v1.block_exchange_pb2_grpc import BlockExchangeStub

VERSION = 1
MAX_DIMS = 8
KEEP_TIMEOUT_S = 1.0
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a node that was started again is not to wait for its forerunner's backoff
    ("grpc.max_receive_message_length", 64 << 20),
)
_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


class PeerRefused(Exception):
    """The node is not there, is not the one that was meant, or does not have what is wanted."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a node says of itself; checked. Attributes: regions: of the layout's groups."""

    layout: NodeLayout
    regions: tuple[Region, ...]
    place: Place
    agent_metadata: bytes


class NixlPeer:
    """Asks one node; used from any thread."""

    def __init__(self, address: PeerAddress, engine_id: str) -> None:
        """Args: engine_id: of the start that is meant."""
        self._engine_id = engine_id
        self._channel = grpc.insecure_channel(str(address), options=_OPTIONS)
        self._stub = BlockExchangeStub(self._channel)

    def greet(self, waiting: Waiting) -> Greeting:
        """Who it is. Raises: PeerRefused, and see Waiting."""
        request = pb.GreetRequest(version=VERSION, engine_id=self._engine_id)
        return _greeting(_result(_ask(self._stub.Greet, request, waiting), waiting))

    def locate(self, lease_id: str, first: int, count: int, last_hash: bytes, waiting: Waiting) -> list[int]:
        """Places of a lease's blocks in its groups; not checked. Raises: PeerRefused, and see Waiting."""
        request = pb.LocateRequest(lease_id=lease_id, first=first, count=count, last_hash=last_hash)
        answer = _result(_ask(self._stub.Locate, request, waiting), waiting)
        block_ids = list(answer.block_ids)
        if len(block_ids) != count:
            raise PeerRefused(f"it answers with {len(block_ids)} blocks where {count} are wanted")
        return block_ids

    def start_check(
        self, lease_id: str, first: int, count: int, groups: Sequence[int], use_words: bool, waiting: Waiting
    ) -> "Checking":
        """Ask for checksums of a lease's blocks. Raises: PeerRefused, TimeoutError."""
        kind = pb.CHECKSUM_WORDS if use_words else pb.CHECKSUM_XXH3
        request = pb.CheckRequest(lease_id=lease_id, first=first, count=count, groups=groups, checksum=kind)
        return Checking(_ask(self._stub.Check, request, waiting), count, len(groups))

    def keep(self, kept: Sequence[str], released: Sequence[str]) -> None:
        """Signs of life; waits a second at most. Raises: PeerRefused."""
        try:
            self._stub.Keep(pb.KeepRequest(kept=kept, released=released), timeout=KEEP_TIMEOUT_S)
        except (grpc.RpcError, ValueError) as error:
            raise _refused(error) from error

    def close(self) -> None:
        """Whatever is being asked fails."""
        self._channel.close()


class Checking:
    """Checksums that were asked for."""

    def __init__(self, call: "Awaited[pb.CheckResponse]", count: int, num_groups: int) -> None:
        self._call = call
        self._count = count
        self._num_groups = num_groups

    def sums(self, waiting: Waiting) -> list[list[int | None]]:
        """By group; None where there is no content.

        Raises: PeerRefused, also if the lease has not held until now; and see Waiting.
        """
        answer = _result(self._call, waiting)
        sums = [entry.sum if entry.HasField("sum") else None for entry in answer.sums]
        if len(sums) != self._count * self._num_groups:
            raise PeerRefused(f"it answers with {len(sums)} checksums for {self._num_groups} times {self._count}")
        return [sums[start : start + self._count] for start in range(0, len(sums), self._count)]


def _ask(method: "grpc.UnaryUnaryMultiCallable[_Request, _Answer]", request: _Request, waiting: Waiting) -> Any:
    try:
        return method.future(request, timeout=waiting.left_s)
    except ValueError as error:
        raise _refused(error) from error


def _result(call: Awaited[_Answer], waiting: Waiting) -> _Answer:
    try:
        return waiting.result(call)
    except grpc.RpcError as error:
        raise _refused(error) from error


def _refused(error: grpc.RpcError | ValueError) -> PeerRefused:
    """ValueError is what gRPC raises on a channel that was closed."""
    if isinstance(error, ValueError):
        return PeerRefused(str(error))
    return PeerRefused(f"{error.code().name}: {error.details()}")


def _greeting(answer: pb.GreetResponse) -> Greeting:
    """Raises: PeerRefused for what no node can have."""
    if not 0 < answer.block_size <= 1 << 16 or not 0 < len(answer.groups) <= MAX_GROUPS:
        raise PeerRefused(f"it has {len(answer.groups)} groups with blocks of {answer.block_size} tokens")
    for group in answer.groups:
        is_sound = len(group.shape) <= MAX_DIMS and 0 < group.num_blocks <= MAX_BLOCKS
        if not is_sound or not 0 < group.block_nbytes <= group.stride < 1 << 40:
            raise PeerRefused(f"its group {group.name!r} has {group.num_blocks} blocks of {group.block_nbytes} bytes")
    layout = NodeLayout(
        answer.block_size,
        tuple(GroupLayout(g.name, g.fingerprint, g.dtype, tuple(g.shape), g.block_nbytes) for g in answer.groups),
    )
    regions = tuple(Region(g.address, g.block_nbytes, g.num_blocks, g.stride) for g in answer.groups)
    return Greeting(layout, regions, Place(answer.is_on_device, answer.device_id), answer.agent_metadata)
