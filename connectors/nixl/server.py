"""Answers to nodes that read blocks from this one's memory; see protos/outrider/v1/block_exchange.proto."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NoReturn

import grpc

from connectors.nixl.agent import NixlAgent
from connectors.nixl.blocks import NixlBlocks
from connectors.nixl.peer import VERSION
from connectors.peer.leases import LeasedBlocks, LeaseLost, LeaseTable
from protos.outrider.v1 import block_exchange_pb2 as pb
from protos.outrider.v1.block_exchange_pb2_grpc import BlockExchangeServicer

NUM_THREADS = 4
MAX_CALLS = 64
"""At a time; more are refused at once."""
GRACE_S = 0.2
"""For calls to end by themselves, and for gRPC to end in any case."""
_OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_send_message_length", 64 << 20))  # two nodes never share a port


class NixlServicer(BlockExchangeServicer):
    """What is read is only said here, the reading is NIXL's. Every call has the agent look after its readers."""

    def __init__(
        self, engine_id: str, blocks: NixlBlocks, leases: LeaseTable, agent: NixlAgent, agent_metadata: bytes
    ) -> None:
        self._engine_id = engine_id
        self._blocks = blocks
        self._leases = leases
        self._agent = agent
        self._agent_metadata = agent_metadata

    def Greet(self, request: pb.GreetRequest, context: grpc.ServicerContext) -> pb.GreetResponse:  # noqa: N802
        """Who this node is."""
        if request.version != VERSION:
            reason = f"version {request.version} was asked for, this node has {VERSION}"
            _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, reason)
        if request.engine_id != self._engine_id:
            reason = f"engine {request.engine_id[:64]} was asked for, this one is {self._engine_id}"
            _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, reason)
        self._agent.wake()
        layout, place = self._blocks.layout, self._blocks.place
        return pb.GreetResponse(
            block_size=layout.block_size,
            groups=[
                pb.BlockGroup(
                    name=group.name,
                    fingerprint=group.fingerprint,
                    dtype=group.dtype,
                    shape=group.shape,
                    block_nbytes=group.block_nbytes,
                    num_blocks=region.num_blocks,
                    address=region.address,
                    stride=region.stride,
                )
                for group, region in zip(layout.groups, self._blocks.regions, strict=True)
            ],
            is_on_device=place.is_on_device,
            device_id=place.device_id,
            agent_metadata=self._agent_metadata,
        )

    def Locate(self, request: pb.LocateRequest, context: grpc.ServicerContext) -> pb.LocateResponse:  # noqa: N802
        """Where a lease's blocks are."""
        with self._reading(request.lease_id, context, threading.Event()) as leased:
            block_ids = _part(leased, request.first, request.count, context)
            last_hash = leased.hashes[request.first + request.count - 1]
            if request.last_hash and request.last_hash != last_hash:
                reason = "the lease's blocks hold other tokens than those that are wanted"
                _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, reason)
            return pb.LocateResponse(block_ids=block_ids)

    def Check(self, request: pb.CheckRequest, context: grpc.ServicerContext) -> pb.CheckResponse:  # noqa: N802
        """Checksums of a lease's blocks."""
        stop = threading.Event()

        def go_on() -> None:
            if stop.is_set() or not context.is_active():
                _refuse(context, grpc.StatusCode.NOT_FOUND, "the lease has ended meanwhile")

        groups = list(request.groups)
        if any(group >= len(self._blocks.regions) for group in groups) or len(set(groups)) != len(groups):
            _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"groups {groups[:16]} are not those of this node")
        if request.checksum not in (pb.CHECKSUM_XXH3, pb.CHECKSUM_WORDS):
            _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "unknown checksum")
        use_words = request.checksum == pb.CHECKSUM_WORDS
        with self._reading(request.lease_id, context, stop) as leased:
            block_ids = _part(leased, request.first, request.count, context)
            sums = [self._blocks.sums(group, block_ids, use_words, go_on) for group in groups]
            go_on()
        return pb.CheckResponse(sums=[pb.BlockSum(sum=value) for group in sums for value in group])

    def Keep(self, request: pb.KeepRequest, context: grpc.ServicerContext) -> pb.KeepResponse:  # noqa: N802
        """Signs of life."""
        if request.kept:
            self._agent.wake()
        for lease_id in request.released:
            self._leases.end(lease_id)
        for lease_id in request.kept:
            self._leases.renew(lease_id)
        return pb.KeepResponse()

    @contextmanager
    def _reading(self, lease_id: str, context: grpc.ServicerContext, stop: threading.Event) -> Iterator[LeasedBlocks]:
        self._agent.wake()
        try:
            with self._leases.reading(lease_id, stop.set) as leased:
                yield leased
        except LeaseLost as error:
            _refuse(context, grpc.StatusCode.NOT_FOUND, str(error))


def _part(leased: LeasedBlocks, first: int, count: int, context: grpc.ServicerContext) -> Sequence[int]:
    if not count or first + count > len(leased.block_ids):
        reason = f"blocks {first} to {first + count} are wanted, the lease has {len(leased.block_ids)}"
        _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, reason)
    return leased.block_ids[first : first + count]


def _refuse(context: grpc.ServicerContext, code: grpc.StatusCode, reason: str) -> NoReturn:
    context.abort(code, reason)
    raise AssertionError  # abort always raises


class NixlServer:
    """A port for that service. Attributes: port: the number it has."""

    def __init__(self, host: str, port: int) -> None:
        """Args: port: 0 for any. Raises: OSError if the address can not be had."""
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="outrider-nixl-rpc")
        self._server = grpc.server(self._threads, options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._server.add_insecure_port(target)
        except RuntimeError as error:
            raise OSError(str(error)) from error

    def start(self, servicer: BlockExchangeServicer) -> None:
        """Answer from now on."""
        from protos.outrider.v1.block_exchange_pb2_grpc import add_BlockExchangeServicer_to_server

        add_BlockExchangeServicer_to_server(servicer, self._server)
        self._server.start()

    def close(self, timeout_s: float) -> None:
        """Close the port and end all calls; may be called twice."""
        self._server.stop(min(GRACE_S, timeout_s)).wait(max(GRACE_S, timeout_s))
        self._threads.shutdown()
