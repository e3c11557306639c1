"""The asyncio client of servers that share the work: some compute prompts, others go on from there.

async with DisaggregatedClient(prefill=["a:50051", "b:50051"], decode=["c:50051"]) as client:
    async for delta in client.generate("Once upon a time", max_tokens=32):
        print(delta.text, end="")
"""

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, Unpack

import grpc

from clients.async_stream import AsyncStream, uncancelled
from clients.channel import Deadline
from clients.errors import (
    CancelledCallError,
    OutriderClientError,
    OverloadedError,
    RequestFailedError,
    UnavailableError,
)
from clients.metadata import Metadata, checked_metadata
from clients.nodes import DEFAULT_HANG_TIMEOUT_S, Node, NodePool
from clients.outputs import Event
from clients.progress import Progress
from clients.prompt_key import beginning_of, estimated_tokens, identity_of
from clients.recent_prompts import RecentPrompts
from clients.requests import GenerateOptions, generate_request
from clients.retry import DEFAULT_RETRY, RetryPolicy
from clients.trace_context import with_trace_context
from protos.outrider.v1 import inference_pb2 as pb

DEFAULT_MIN_PROMPT_TOKENS = 128


class DisaggregatedGeneration(AsyncStream):
    """One generation: its first tokens from a prefill node, the others from a decode node.

    A node that fails before it has said anything is replaced by another one. One that is lost later is gone on from,
    where the prompt's ids are known, as they are behind a prefill node: what was delivered is computed again.

    Attributes:
        prefill_target, decode_target: the nodes it came to last; None for none.
    """

    def __init__(
        self,
        request: pb.GenerateRequest,
        prefill: NodePool,
        decode: NodePool,
        *,
        holder: Node | None,
        retry: RetryPolicy,
        timeout_s: float | None,
        metadata: tuple[tuple[str, str | bytes], ...],
        on_end: Callable[[Node], None],
    ) -> None:
        """Args:
        prefill: nodes to begin on; if none is up, a decode node does all of it.
        holder: the decode node to do all of it, if it is up.
        on_end: called with the node that the last choice ended on, if that is a decode node.
        """
        super().__init__()
        self.prefill_target: str | None = None
        self.decode_target: str | None = None
        self._whole_request = request
        self._prefill = prefill
        self._decode = decode
        self._retry = retry
        self._deadline = Deadline(timeout_s)
        self._metadata = metadata
        self._on_end = on_end
        self._key = beginning_of(request)
        self._progress = Progress(request)
        self._goes_on = False
        self._beginner: Node | None = None
        self._is_cancelled = False
        self._loss: OutriderClientError | None = None
        node = None if holder is not None else prefill.pick(self._key)
        if node is not None:
            self._enter(prefill, self._progress.first_request(), node)
        else:
            self._enter(decode, request, holder or self._any_decode_node())

    def cancel(self) -> None:
        """End the call that is live; none follows it, and what is held for one is let go."""
        self._is_cancelled = True
        self._call.cancel()
        if self._beginner is not None and self._progress.has_lease:
            self._beginner.release(self._progress.request_id)
        self._beginner = None

    async def _read(self) -> Event | None:
        """The next event, None at the end; goes on elsewhere where it was handed on or can be."""
        while True:
            try:
                message = await uncancelled(self._call.read())
            except OutriderClientError as error:
                await self._recover(error)
                continue
            if isinstance(message, pb.GenerateResponse):
                if (event := self._take_in(message)) is not None:
                    return event
            elif self._is_prefill and not self._progress.is_complete:
                self._go_on()
            else:
                if not self._is_prefill:
                    self._on_end(self._node)
                return None

    @property
    def _is_prefill(self) -> bool:
        return self._pool is self._prefill

    def _enter(self, pool: NodePool, request: pb.GenerateRequest, node: Node) -> None:
        """Begin a part of the whole."""
        self._pool, self._request = pool, request
        self._num_attempts = 0
        self._failed: set[Node] = set()
        self._begin(node)

    def _begin(self, node: Node) -> None:
        if self._is_cancelled:
            raise CancelledCallError("the call was cancelled", grpc.StatusCode.CANCELLED)
        self._node = node
        self._num_attempts += 1
        self._has_output = False
        if self._is_prefill:
            self.prefill_target = node.target
        else:
            self.decode_target = node.target
        self._call = node.generate(self._request, self._deadline.remaining_s(), self._metadata)

    def _go_on(self) -> None:
        """Have a decode node go on from where the request has come to."""
        if self._is_prefill:
            self._beginner = self._node
        self._goes_on = True
        self._enter(self._decode, self._progress.continuation(), self._any_decode_node())

    def _any_decode_node(self) -> Node:
        node = self._decode.pick(self._key) or self._decode.pick(self._key, is_up=False)
        assert node is not None, "there is at least one"
        return node

    def _take_in(self, message: pb.GenerateResponse) -> Event | None:
        """What a message says to the caller, who hears once that it started, and nothing of the hop."""
        self._progress.take_in(message)
        match message.WhichOneof("event"):
            case "started":
                is_first = self.started is None
                event = None if self._goes_on else self._builder.add(message)
                return event if is_first else None
            case "finished" if self._goes_on:
                self._progress.complete(message.finished)
            case "finished" if self._is_prefill and message.finished.HasField("handed_on"):
                return None
        self._has_output = True
        if self._goes_on:  # it has what it wants of the KV
            self._beginner = None
        return self._builder.add(message)

    async def _recover(self, error: OutriderClientError) -> None:
        """Have another node do what this one did not. Raises: the error, where that is not possible."""
        is_loss = isinstance(error, UnavailableError)
        if is_loss:
            self._node.is_up = False
        if self._has_output and is_loss and self._progress.can_go_on:
            self._loss = error
            self._go_on()
            return
        is_failure = isinstance(error, OverloadedError) or (isinstance(error, RequestFailedError) and self._goes_on)
        if self._has_output or not (is_loss or is_failure):
            # If a choice had ended when its node was lost, whoever is to go on with it refuses: that is the loss.
            raise self._loss or error
        self._failed.add(self._node)
        may_try = self._num_attempts < self._retry.max_attempts
        node = self._pool.pick(self._key, without=self._failed) if may_try else None
        if not self._is_prefill:
            self._begin(node or await self._node_after_pause(error))
            return
        self._progress.forget()
        if node is not None:
            self._begin(node)
        else:
            self.prefill_target = None
            self._enter(self._decode, self._whole_request, self._any_decode_node())

    async def _node_after_pause(self, error: OutriderClientError) -> Node:
        """A decode node, once all have failed. Raises: the error, where another attempt is not worth it."""
        pause_s = self._retry.pause_s(error, self._num_attempts, self._deadline.remaining_s())
        if pause_s is None:
            raise error
        await asyncio.sleep(pause_s)
        self._failed.clear()
        return self._any_decode_node()


class DisaggregatedClient:
    """A client of prefill nodes and decode nodes; lives on one event loop, shared by any number of tasks.

    Requests that begin alike go to the same nodes, as long as these have not much more to do than the others.
    """

    def __init__(
        self,
        *,
        prefill: Iterable[str],
        decode: Iterable[str],
        min_prompt_tokens: int = DEFAULT_MIN_PROMPT_TOKENS,
        remembers_prompts: bool = True,
        retry: RetryPolicy = DEFAULT_RETRY,
        hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S,
    ) -> None:
        """Args:
        prefill, decode: targets, HOST:PORT or unix:PATH; at least one decode node.
        min_prompt_tokens: shorter prompts, by their ids or a quarter of their bytes, are a decode node's alone.
        remembers_prompts: whether a prompt that a decode node has answered lately is that node's alone.
        retry: attempts of each part of a request; there are pauses once every decode node was tried.
        hang_timeout_s: how long a node may give no sign of life until it is taken for lost, half of that when it is
            connected to, or asked for its load; at least 1. One that computes gives signs.
        """
        self._prefill = NodePool(prefill, hang_timeout_s)
        self._decode = NodePool(decode, hang_timeout_s)
        if not self._decode.nodes:
            raise ValueError("at least one decode node is needed")
        self._nobody = NodePool(())
        self._min_prompt_tokens = min_prompt_tokens
        self._retry = retry
        self._recent = RecentPrompts() if remembers_prompts else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is live and disconnect."""
        await self._prefill.close()
        await self._decode.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> DisaggregatedGeneration:
        """Begin a generation from text, `token_ids` or `messages`.

        A prompt that a decode node has seen lately, and a short one, are that node's alone.

        Args:
            metadata: sent along to each node; without a W3C traceparent there it begins a trace.
        Raises: InvalidRequestError for what the wire cannot carry.
        """
        request = generate_request(prompt, options)
        self._prefill.refresh_if_old()
        self._decode.refresh_if_old()
        is_short = estimated_tokens(request) < self._min_prompt_tokens
        recent, identity = self._recent, identity_of(request)
        holder = None if recent is None else recent.find(identity)
        return DisaggregatedGeneration(
            request,
            self._nobody if is_short else self._prefill,
            self._decode,
            holder=holder if holder is not None and self._decode.is_idle_enough(holder) else None,
            retry=self._retry,
            timeout_s=timeout_s,
            metadata=with_trace_context(checked_metadata(metadata)),
            on_end=lambda node: None if recent is None else recent.remember(identity, node),
        )
