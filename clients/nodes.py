"""Servers that do the same part of requests, and which of them is to do the next one."""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Collection, Iterable
from typing import Any

import grpc

from clients.async_stream import Call, uncancelled
from clients.channel import channel_options
from clients.errors import OutriderClientError
from clients.trace_context import untraced
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1.inference_pb2_grpc import InferenceStub

MAX_EXTRA_LOAD = 4
"""Requests that a node may have more than the idlest, and still be taken because it may know the prompt."""
REFRESH_S = 1.0
"""How old what is known of the nodes may be when it decides."""
ABORT_TIMEOUT_S = 2.0
"""A node is not waited for longer that is told that nobody goes on with what it holds."""
DEFAULT_HANG_TIMEOUT_S = 5.0
"""How long a node may give no sign of life, half of that to begin with or in answer to a question, before another one
takes its place.
"""
MIN_HANG_TIMEOUT_S = 1.0
"""Servers take more than two questions a second for an attack."""


class Node:
    """One server, as it was last heard of; lives on one event loop.

    Attributes:
        is_up: whether it answered when it was asked last.
    """

    def __init__(self, target: str, hang_timeout_s: float) -> None:
        self.target = target
        self.is_up = True
        self._answer_timeout_s = half_s = hang_timeout_s / 2
        options = channel_options(connect_s=half_s, ping_after_s=half_s, ping_timeout_s=half_s)
        self._channel = grpc.aio.insecure_channel(target, options=options)
        self._stub = InferenceStub(self._channel)
        self._num_live = 0
        self._aborting: set[asyncio.Task[None]] = set()
        self._num_others = 0

    @property
    def load(self) -> int:
        """Its requests: those of this client now, and others as of its last answer."""
        return self._num_live + self._num_others

    def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None, metadata: tuple[tuple[str, str | bytes], ...]
    ) -> Call:
        """Begin a call."""
        call: Call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        self._num_live += 1
        call.add_done_callback(self._ended)
        return call

    async def refresh(self) -> None:
        """Ask for its load; one that does not answer is down."""
        num_live = self._num_live
        try:
            question = self._stub.GetStats(pb.GetStatsRequest(), timeout=self._answer_timeout_s, metadata=untraced())
            stats = await uncancelled(question)
        except OutriderClientError:
            self.is_up = False
            return
        self.is_up = True
        self._num_others = max(0, stats.num_running + stats.num_waiting - num_live)

    def release(self, request_id: str) -> None:
        """Tell it, aside, that nobody goes on with what it has handed on; what is held there ends by itself as well."""
        task = asyncio.get_running_loop().create_task(self._abort(request_id))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def close(self) -> None:
        """Cancel what is live and disconnect."""
        await asyncio.gather(*self._aborting)
        await self._channel.close()

    async def _abort(self, request_id: str) -> None:
        request = pb.AbortRequest(request_ids=[request_id])
        with contextlib.suppress(OutriderClientError):
            await uncancelled(self._stub.Abort(request, timeout=ABORT_TIMEOUT_S))

    def _ended(self, _: Any) -> None:
        self._num_live -= 1


class NodePool:
    """Nodes of which any can do what is asked; lives on one event loop."""

    def __init__(self, targets: Iterable[str], hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S) -> None:
        """Raises: ValueError for a time below MIN_HANG_TIMEOUT_S."""
        if hang_timeout_s < MIN_HANG_TIMEOUT_S:
            raise ValueError(f"hang_timeout_s must be at least {MIN_HANG_TIMEOUT_S:g}, got {hang_timeout_s:g}")
        self.nodes = [Node(target, hang_timeout_s) for target in dict.fromkeys(targets)]
        self._refreshed_s = float("-inf")
        self._refreshing: asyncio.Task[None] | None = None

    def pick(self, key: bytes, *, without: Collection[Node] = (), is_up: bool = True) -> Node | None:
        """Of the least loaded nodes the one that requests with this key always go to; None if there is none.

        Args: is_up: leave out nodes that did not answer.
        Source: Thaler and Ravishankar 1998, "Using name-based mappings to increase hit rates" (rendezvous hashing).
        """
        candidates = [node for node in self.nodes if node not in without and (node.is_up or not is_up)]
        if not candidates:
            return None
        most = min(node.load for node in candidates) + MAX_EXTRA_LOAD
        return max((node for node in candidates if node.load <= most), key=lambda node: _rank(key, node.target))

    def is_idle_enough(self, node: Node) -> bool:
        """Whether a node is up and not much more loaded than the others."""
        return node.is_up and node.load <= min(other.load for other in self.nodes if other.is_up) + MAX_EXTRA_LOAD

    def refresh_if_old(self) -> None:
        """Ask all nodes for their load, aside, unless that was done a moment ago."""
        is_busy = self._refreshing is not None and not self._refreshing.done()
        if is_busy or time.monotonic() - self._refreshed_s < REFRESH_S:
            return
        self._refreshed_s = time.monotonic()
        self._refreshing = asyncio.get_running_loop().create_task(self._refresh())

    async def close(self) -> None:
        """Cancel what is live and disconnect."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        for node in self.nodes:
            await node.close()

    async def _refresh(self) -> None:
        await asyncio.gather(*(node.refresh() for node in self.nodes))


def _rank(key: bytes, target: str) -> bytes:
    return hashlib.blake2b(key + target.encode(), digest_size=8).digest()
