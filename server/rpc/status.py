"""The only place that knows gRPC status codes: every error becomes a rich status here."""

import logging
import uuid

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from server.errors import (
    ConfigError,
    DeadlineExceeded,
    DuplicateRequest,
    EngineDead,
    InvalidRequest,
    ModelError,
    OutriderError,
    Overloaded,
    RequestFailed,
    WrongRole,
)

_log = logging.getLogger(__name__)

ERROR_DOMAIN = "outrider"
CODES: dict[type[OutriderError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
    WrongRole: grpc.StatusCode.FAILED_PRECONDITION,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestFailed: grpc.StatusCode.INTERNAL,
    EngineDead: grpc.StatusCode.UNAVAILABLE,
    # Both end a command before it serves; a call that meets one all the same is not to blame.
    ConfigError: grpc.StatusCode.INTERNAL,
    ModelError: grpc.StatusCode.INTERNAL,
}

# The status travels in HTTP/2 trailers, of which clients accept 8 KiB: one refused list must not burst them.
_MAX_VIOLATIONS = 16
_MAX_FIELD_BYTES = 80
_MAX_DESCRIPTION_BYTES = 160
_MAX_MESSAGE_BYTES = 400
_DEADLINE_SLACK_S = 0.05


def status_of(error: Exception) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """The status code and the rich status of an error.

    What is not an OutriderError is a bug: its text stays in the log, the caller gets an id to ask about.
    """
    if not isinstance(error, OutriderError):
        error_id = uuid.uuid4().hex[:12]
        _log.error("unexpected error %s", error_id, exc_info=error)
        error = RequestFailed("internal error", error_id=error_id)
    code = next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)
    detail = _detail_of(error)
    return code, status_pb2.Status(
        code=code.value[0],
        message=_shorten(str(error), _MAX_MESSAGE_BYTES),
        details=[] if detail is None else [_packed(detail)],
    )


def status_of_cancellation(time_remaining_s: float | None) -> grpc.StatusCode:
    """What a call that the transport cancelled ended with, by the time its deadline left.

    The client's clock cancels it too: what arrives within a moment of the deadline is the deadline's work.
    """
    expired = time_remaining_s is not None and time_remaining_s <= _DEADLINE_SLACK_S
    return grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED


def _detail_of(error: OutriderError) -> Message | None:
    detail: Message | None = None
    match error:
        case InvalidRequest():
            detail = error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(
                        field=_shorten(violation.field, _MAX_FIELD_BYTES),
                        description=_shorten(violation.description, _MAX_DESCRIPTION_BYTES),
                    )
                    for violation in error.violations[:_MAX_VIOLATIONS]
                ]
            )
        case Overloaded():
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(error.retry_after_s * 1e9))
            detail = error_details_pb2.RetryInfo(retry_delay=delay)
        case RequestFailed():
            detail = error_details_pb2.ErrorInfo(
                reason="REQUEST_FAILED", domain=ERROR_DOMAIN, metadata={"error_id": error.error_id}
            )
    return detail


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _shorten(text: str, limit: int) -> str:
    """The text, cut to `limit` bytes of UTF-8."""
    encoded = text.encode(errors="replace")
    return encoded.decode() if len(encoded) <= limit else encoded[: limit - 3].decode(errors="ignore") + "…"
