"""What a call may raise, by what its caller should do.

OutriderClientError           base; `code` is the gRPC status code
├── InvalidRequestError       correct the request; `violations` name the fields
├── DuplicateRequestError     the request id is in use by a live request
├── WrongRoleError            ask a node of another role
├── OverloadedError           try again after `retry_after_s`
├── MessageTooLargeError      a message is over the server's or the client's limit
├── DeadlineExceededError     `timeout_s` passed
├── CancelledCallError        the call was cancelled by this client
├── UnavailableError          no server answers there, or it is stopping
├── RequestFailedError        the server broke on this request; quote `error_id` to its operator
└── UnexpectedStatusError     any other status
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, TypeVar, cast

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

_STATUS_DETAILS_KEY = "grpc-status-details-bin"
_OWN_CANCELLATIONS = ("Locally cancelled by application!", "Channel closed!")
"""Parts of what blocking calls say that this side cancelled; asyncio ones raise asyncio.CancelledError there."""
_Detail = TypeVar("_Detail", bound=Message)


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One refused field, by its path in the request, and what would be accepted."""

    field: str
    description: str


class OutriderClientError(Exception):
    """Base of all errors of the clients."""

    def __init__(self, message: str, code: grpc.StatusCode) -> None:
        super().__init__(message)
        self.code = code


class InvalidRequestError(OutriderClientError):
    """The request can never succeed as it stands."""

    def __init__(self, message: str, code: grpc.StatusCode, violations: tuple[FieldViolation, ...]) -> None:
        super().__init__(message, code)
        self.violations = violations

    @classmethod
    def of(cls, field: str, description: str) -> Self:
        """For what this side refuses before it is sent."""
        violation = FieldViolation(field, description)
        return cls(f"{field}: {description}", grpc.StatusCode.INVALID_ARGUMENT, (violation,))


class DuplicateRequestError(OutriderClientError):
    """A live request has this id."""


class WrongRoleError(OutriderClientError):
    """The node does another part of disaggregated requests; `--role` says which."""


class OverloadedError(OutriderClientError):
    """The server's queue is full."""

    def __init__(self, message: str, code: grpc.StatusCode, retry_after_s: float) -> None:
        super().__init__(message, code)
        self.retry_after_s = retry_after_s


class MessageTooLargeError(OutriderClientError):
    """A message is over the limit that the text names."""


class DeadlineExceededError(OutriderClientError):
    """The call's `timeout_s` passed."""


class CancelledCallError(OutriderClientError):
    """The call was cancelled here: left, cancelled, or its client closed."""


class UnavailableError(OutriderClientError):
    """No server could be reached, or it is stopping or must be restarted.

    A server that stops while a call is on its way to it may end that call with CANCELLED, before any code of its own
    sees it; its `code` is CANCELLED then. Calls that this client cancelled are CancelledCallError.
    """


class RequestFailedError(OutriderClientError):
    """The server failed on this request alone; `error_id`, empty if unknown, is in its log."""

    def __init__(self, message: str, code: grpc.StatusCode, error_id: str) -> None:
        super().__init__(message, code)
        self.error_id = error_id


class UnexpectedStatusError(OutriderClientError):
    """A status that the contract does not name."""


_PLAIN: dict[grpc.StatusCode, type[OutriderClientError]] = {
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: WrongRoleError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CancelledCallError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
}


def error_from_rpc(error: grpc.RpcError) -> OutriderClientError:
    """The typed error for what gRPC raised, sync or aio."""
    code, message = error.code(), error.details() or ""
    details = _rich_status(error)
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequestError(message or "invalid request", code, _violations(details))
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            retry_info = _detail(details, error_details_pb2.RetryInfo())
            if retry_info is None:
                return MessageTooLargeError(message, code)
            return OverloadedError(message, code, retry_info.retry_delay.ToNanoseconds() / 1e9)
        case grpc.StatusCode.INTERNAL:
            info = _detail(details, error_details_pb2.ErrorInfo())
            return RequestFailedError(message, code, "" if info is None else info.metadata["error_id"])
        case grpc.StatusCode.CANCELLED if not any(own in message for own in _OWN_CANCELLATIONS):
            return UnavailableError(f"the server ended the call: {message or 'no reason given'}", code)
    kind = _PLAIN.get(code)
    return UnexpectedStatusError(f"{code.name}: {message}", code) if kind is None else kind(message, code)


def _rich_status(error: grpc.RpcError) -> status_pb2.Status:
    """The status in the trailers, empty if there is none.

    grpcio-status reads it from calls only; an aio error is not one, and both have trailers.
    """
    # The stubs take one trailer for all of them.
    trailers = cast("Iterable[tuple[str, bytes]]", error.trailing_metadata() or ())
    status = status_pb2.Status()
    for key, value in trailers:
        if key == _STATUS_DETAILS_KEY:
            status.ParseFromString(value)
    return status


def _detail(status: status_pb2.Status, into: _Detail) -> _Detail | None:
    return next((into for packed in status.details if packed.Unpack(into)), None)


def _violations(status: status_pb2.Status) -> tuple[FieldViolation, ...]:
    bad_request = _detail(status, error_details_pb2.BadRequest())
    if bad_request is None:
        return ()
    return tuple(FieldViolation(item.field, item.description) for item in bad_request.field_violations)
