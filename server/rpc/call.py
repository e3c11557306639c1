"""One gRPC call from its arrival to its one CallFinished event, whatever its outcome."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_status import rpc_status  # type: ignore[import-untyped]

from server.engine.protocol import Delta, Finished
from server.events import CallFinished, EventBus
from server.rpc.status import status_of, status_of_cancellation


class CallRecord:
    """What CallFinished will say of a call; owned by its handler's task."""

    def __init__(self, service: str) -> None:
        self._service = service
        self.request_id = ""
        self.num_prompt_tokens = 0
        self.attributes: dict[str, str | int | float | bool] = {}
        self.choices: tuple[Finished, ...] = ()
        self._num_streamed_tokens = 0

    def add_delta(self, delta: Delta) -> None:
        """Count the tokens of a delta."""
        self._num_streamed_tokens += len(delta.token_ids)

    def event(self, method: str, metadata: dict[str, str], status: str, error: str, start_ns: int) -> CallFinished:
        """The event, as of now."""
        return CallFinished(
            method=method,
            metadata=metadata,
            status=status,
            error=error,
            start_unix_ns=start_ns,
            end_unix_ns=time.time_ns(),
            request_id=self.request_id,
            choices=self.choices,
            num_prompt_tokens=self.num_prompt_tokens,
            num_completion_tokens=self._num_streamed_tokens,
            attributes=self.attributes,
            service=self._service,
        )


@asynccontextmanager
async def recorded_call(
    method: str,
    context: "grpc.aio.ServicerContext[Any, Any]",
    events: EventBus,
    *,
    service: str = "outrider.v1.Inference",
) -> AsyncIterator[CallRecord]:
    """Turn errors of the body into the call's status and publish its CallFinished.

    The event goes out before the client can learn the status. Cancellation goes on up, once recorded.
    """
    start_ns = time.time_ns()
    record = CallRecord(service)
    metadata = _text_metadata(context.invocation_metadata() or ())

    def publish(code: grpc.StatusCode, error: str) -> None:
        events.publish(record.event(method, metadata, code.name, error, start_ns))

    try:
        yield record
    except asyncio.CancelledError:
        code = status_of_cancellation(context.time_remaining())
        publish(code, "the client left or its deadline passed, or the server stopped")
        raise
    except Exception as error:
        code, status = status_of(error)
        publish(code, status.message)
        await context.abort(code, status.message, rpc_status.to_status(status).trailing_metadata)
    else:
        publish(grpc.StatusCode.OK, "")


def _text_metadata(metadata: Any) -> dict[str, str]:
    return {key.lower(): value for key, value in metadata if isinstance(value, str)}
