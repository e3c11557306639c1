"""Every error has a status, and a client turns it back into an error that says the same."""

import logging
from collections.abc import Iterator

import grpc
import pytest
from grpc_status import rpc_status  # type: ignore[import-untyped]

from clients import errors as client_errors
from server import errors as server_errors
from server.errors import (
    ConfigError,
    DeadlineExceeded,
    DuplicateRequest,
    EngineDead,
    FieldViolation,
    InvalidRequest,
    ModelError,
    OutriderError,
    Overloaded,
    RequestFailed,
    WrongRole,
)
from server.rpc.status import CODES, status_of, status_of_cancellation

ERRORS: list[tuple[OutriderError, type[client_errors.OutriderClientError]]] = [
    (InvalidRequest.of("sampling.top_p", "must be above 0"), client_errors.InvalidRequestError),
    (DuplicateRequest("r"), client_errors.DuplicateRequestError),
    (WrongRole("ask another"), client_errors.WrongRoleError),
    (Overloaded("the queue is full", retry_after_s=1.25), client_errors.OverloadedError),
    (DeadlineExceeded("r", "queued"), client_errors.DeadlineExceededError),
    (RequestFailed("logits are NaN", error_id="abc"), client_errors.RequestFailedError),
    (EngineDead("restart"), client_errors.UnavailableError),
    (ConfigError("no"), client_errors.RequestFailedError),
    (ModelError("no"), client_errors.RequestFailedError),
]


def _subclasses(kind: type[OutriderError]) -> Iterator[type[OutriderError]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _as_client_sees_it(error: Exception) -> client_errors.OutriderClientError:
    code, status = status_of(error)
    sent = rpc_status.to_status(status)
    assert sent.code is code
    trailers = grpc.aio.Metadata(*sent.trailing_metadata)
    return client_errors.error_from_rpc(grpc.aio.AioRpcError(code, None, trailers, sent.details))


def test_no_error_is_unmapped() -> None:
    ours = {kind for kind in _subclasses(OutriderError) if kind.__module__ == server_errors.__name__}
    assert set(CODES) == ours == {type(error) for error, _ in ERRORS}


@pytest.mark.parametrize(("error", "kind"), ERRORS)
def test_errors_cross_the_wire(error: OutriderError, kind: type[client_errors.OutriderClientError]) -> None:
    seen = _as_client_sees_it(error)
    assert type(seen) is kind
    assert seen.code is CODES[type(error)]
    assert str(seen) == str(error)


def test_details_cross_the_wire() -> None:
    invalid = _as_client_sees_it(InvalidRequest(FieldViolation("a", "b"), FieldViolation("é", "ü")))
    assert isinstance(invalid, client_errors.InvalidRequestError)
    assert [(item.field, item.description) for item in invalid.violations] == [("a", "b"), ("é", "ü")]
    overloaded = _as_client_sees_it(Overloaded("full", retry_after_s=1.25))
    assert isinstance(overloaded, client_errors.OverloadedError)
    assert overloaded.retry_after_s == 1.25
    failed = _as_client_sees_it(RequestFailed("broke", error_id="abc"))
    assert isinstance(failed, client_errors.RequestFailedError)
    assert failed.error_id == "abc"


def test_an_unknown_error_keeps_its_text_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        seen = _as_client_sees_it(KeyError("a secret"))
    assert isinstance(seen, client_errors.RequestFailedError)
    assert "secret" not in str(seen)
    assert seen.error_id in str(seen)
    assert seen.error_id in caplog.text
    assert "a secret" in caplog.text


def test_trailers_stay_small() -> None:
    """Clients accept 8 KiB of trailers; details are in base64 there, and the message once more, percent-encoded."""
    code, status = status_of(InvalidRequest(*(FieldViolation("🙂" * 500, "🙂" * 500) for _ in range(500))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    num_bytes = len(status.SerializeToString()) * 4 / 3 + len(status.message.encode()) * 3
    assert num_bytes < 8 * 1024


@pytest.mark.parametrize(
    ("remaining_s", "code"),
    [(None, grpc.StatusCode.CANCELLED), (1.0, grpc.StatusCode.CANCELLED), (0.0, grpc.StatusCode.DEADLINE_EXCEEDED)],
)
def test_a_cancelled_call_expired_if_no_time_is_left(remaining_s: float | None, code: grpc.StatusCode) -> None:
    assert status_of_cancellation(remaining_s) is code
