"""The blocking client.

with Client("127.0.0.1:50051") as client:
    for delta in client.generate("Once upon a time", max_tokens=32):
        print(delta.text, end="")
"""

import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from clients.channel import (
    CHANNEL_OPTIONS,
    HEALTH_REQUEST,
    HEALTH_SERVING,
    HEALTH_WATCH,
    NO_ANSWER,
    NOT_SERVING,
    Deadline,
    not_ready,
)
from clients.errors import DeadlineExceededError, OutriderClientError, UnavailableError, error_from_rpc
from clients.metadata import Metadata, checked_metadata
from clients.outputs import Delta, Event, Finished, GenerationOutput, OutputBuilder, Started
from clients.requests import (
    GenerateOptions,
    Message,
    abort_request,
    detokenize_request,
    generate_request,
    tokenize_request,
)
from clients.retry import DEFAULT_RETRY, RetryPolicy
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1.inference_pb2_grpc import InferenceStub


class Generation:
    """One generation under way; begun when made, read by one thread, once.

    Iterating yields the deltas of all choices. Leaving the loop or the `with` block cancels
    the call, and the server ends the request. `cancel` may be called from any thread.
    """

    def __init__(self, open_call: Callable[[float | None], Any], retry: RetryPolicy, timeout_s: float | None) -> None:
        self._open_call = open_call
        self._retry = retry
        self._deadline = Deadline(timeout_s)
        self._builder = OutputBuilder()
        self._has_tokens = False
        self._num_attempts = 1
        self._call = open_call(self._deadline.remaining_s())

    @property
    def started(self) -> Started | None:
        """What the server said when it began; None before that."""
        return self._builder.started

    @property
    def finished(self) -> dict[int, Finished]:
        """The choices that have ended so far, by index."""
        return self._builder.finished

    @property
    def output(self) -> GenerationOutput:
        """The choices that have ended so far, whole."""
        return self._builder.output()

    def __iter__(self) -> Iterator[Delta]:
        try:
            while (event := self._read()) is not None:
                if isinstance(event, Delta):
                    yield event
        finally:
            self.cancel()

    def events(self) -> Iterator[Event]:
        """Iterates over everything the server says, in its order, in place of the deltas alone."""
        try:
            while (event := self._read()) is not None:
                yield event
        finally:
            self.cancel()

    def result(self) -> GenerationOutput:
        """Read to the end; everything the request produced."""
        for _ in self:
            pass
        return self._builder.output()

    def text(self) -> str:
        """Read to the end; the text of the first choice."""
        return self.result().text

    def cancel(self) -> None:
        """End the call if it is live."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def _read(self) -> Event | None:
        """The next event, None at the end; begins anew where that is safe and of use."""
        while True:
            try:
                message: pb.GenerateResponse | None = next(self._call, None)
            except grpc.RpcError as rpc_error:
                error = error_from_rpc(rpc_error)
                pause_s = self._retry.pause_s(error, self._num_attempts, self._deadline.remaining_s())
                if self._has_tokens or pause_s is None:
                    raise error from rpc_error
                time.sleep(pause_s)
                self._begin_anew()
                continue
            if message is None:
                return None
            if (event := self._builder.add(message)) is not None:
                self._has_tokens |= isinstance(event, Delta)
                return event

    def _begin_anew(self) -> None:
        self._num_attempts += 1
        self._builder = OutputBuilder()
        self._call = self._open_call(self._deadline.remaining_s())


class Client:
    """A client of one server, shared by any number of threads.

    `target` is HOST:PORT or unix:PATH. Methods raise OutriderClientError. `timeout_s` bounds
    a call with all its retries; None waits for ever.
    """

    def __init__(self, target: str, *, retry: RetryPolicy = DEFAULT_RETRY) -> None:
        self._target = target
        self._retry = retry
        self._channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._stub = InferenceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is live and disconnect."""
        self._channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Begin a generation from text, `token_ids` or `messages`.

        Args:
            metadata: sent along, such as a W3C traceparent.
        Raises: InvalidRequestError for what the wire cannot carry.
        """
        request, headers = generate_request(prompt, options), checked_metadata(metadata)

        def open_call(remaining_s: float | None) -> Any:
            return self._stub.Generate(request, timeout=remaining_s, metadata=headers)

        return Generation(open_call, self._retry, timeout_s)

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Iterable[Message] | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """The token ids of a text or a conversation, as a generation would have them."""
        request = tokenize_request(text, messages, add_special_tokens)
        response: pb.TokenizeResponse = self._unary(self._stub.Tokenize, request, timeout_s)
        return list(response.token_ids)

    def detokenize(
        self, token_ids: Iterable[int], *, skip_special_tokens: bool | None = None, timeout_s: float | None = None
    ) -> str:
        """The text of some token ids."""
        request = detokenize_request(token_ids, skip_special_tokens)
        response: pb.DetokenizeResponse = self._unary(self._stub.Detokenize, request, timeout_s)
        return response.text

    def abort(self, *request_ids: str, timeout_s: float | None = None) -> dict[str, bool]:
        """End requests early; says per id whether it was live."""
        request = abort_request(request_ids)
        response: pb.AbortResponse = self._unary(self._stub.Abort, request, timeout_s)
        return {result.request_id: result.found for result in response.results}

    def model_info(self, *, timeout_s: float | None = None) -> pb.GetModelInfoResponse:
        """The loaded model and its limits."""
        response: pb.GetModelInfoResponse = self._unary(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout_s)
        return response

    def stats(self, *, timeout_s: float | None = None) -> pb.GetStatsResponse:
        """A snapshot of the server."""
        response: pb.GetStatsResponse = self._unary(self._stub.GetStats, pb.GetStatsRequest(), timeout_s)
        return response

    def wait_ready(self, *, timeout_s: float | None = None) -> None:
        """Wait until a server answers there and reports SERVING. Raises: DeadlineExceededError, which says why not."""
        deadline, last = Deadline(timeout_s), NO_ANSWER
        watch: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(HEALTH_WATCH)
        while True:
            call = watch(HEALTH_REQUEST, timeout=deadline.remaining_s())  # fails fast, so says why
            try:
                for answer in call:
                    if answer == HEALTH_SERVING:
                        return
                    last = NOT_SERVING
            except grpc.RpcError as rpc_error:
                error = error_from_rpc(rpc_error)
                if isinstance(error, DeadlineExceededError):
                    raise not_ready(self._target, timeout_s, last) from rpc_error
                if not isinstance(error, UnavailableError):
                    raise error from rpc_error
                last = str(error)
            finally:
                call.cancel()
            time.sleep(self._retry.initial_backoff_s)

    def _unary(self, method: Callable[..., Any], request: object, timeout_s: float | None) -> Any:
        deadline = Deadline(timeout_s)
        num_attempts = 1
        while True:
            try:
                return method(request, timeout=deadline.remaining_s())
            except grpc.RpcError as rpc_error:
                error: OutriderClientError = error_from_rpc(rpc_error)
                pause_s = self._retry.pause_s(error, num_attempts, deadline.remaining_s())
                if pause_s is None:
                    raise error from rpc_error
                time.sleep(pause_s)
                num_attempts += 1
