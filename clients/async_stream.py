"""One generation under way, wherever its events come from."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Generator
from types import TracebackType
from typing import Any, Self

import grpc

from clients.errors import CancelledCallError, error_from_rpc
from clients.outputs import Delta, Event, Finished, GenerationOutput, OutputBuilder, Started
from protos.outrider.v1 import inference_pb2 as pb

Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class AsyncStream(ABC):
    """One generation under way; begun when made, read by one task, once.

    Iterating yields the deltas of all choices. Leaving the loop, the `async with` block or
    the task cancels the call, and the server ends the request.
    """

    def __init__(self) -> None:
        self._builder = OutputBuilder()

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

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while (event := await self._read()) is not None:
                if isinstance(event, Delta):
                    yield event
        finally:
            self.cancel()

    async def events(self) -> AsyncIterator[Event]:
        """Iterates over everything the server says, in its order, in place of the deltas alone."""
        try:
            while (event := await self._read()) is not None:
                yield event
        finally:
            self.cancel()

    async def result(self) -> GenerationOutput:
        """Read to the end; everything the request produced."""
        async for _ in self:
            pass
        return self._builder.output()

    def __await__(self) -> Generator[Any, None, GenerationOutput]:
        return self.result().__await__()

    async def text(self) -> str:
        """Read to the end; the text of the first choice."""
        return (await self.result()).text

    @abstractmethod
    def cancel(self) -> None:
        """End the call if it is live."""

    async def aclose(self) -> None:
        """End the call if it is live; for contextlib.aclosing."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    @abstractmethod
    async def _read(self) -> Event | None:
        """The next event, None at the end. Raises: OutriderClientError."""


async def uncancelled(reading: Awaitable[Any]) -> Any:
    """Await gRPC with typed errors; only a cancellation of the awaiting task itself stays one."""
    try:
        return await reading
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CancelledCallError("the call was cancelled", grpc.StatusCode.CANCELLED) from None
