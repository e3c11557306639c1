"""What a failed call tells the user: what happened and what to do, in place of gRPC's own words."""

from collections.abc import Iterator
from contextlib import contextmanager

from clients.errors import DeadlineExceededError, OutriderClientError, UnavailableError
from server.errors import OutriderError

_START = "start one with `outrider serve`"
_NO_CONNECTION = ("failed to connect", "errors resolving")
"""How gRPC's texts begin where there is nobody to talk to."""


@contextmanager
def one_line_errors(target: str, timeout_s: float | None = None, *, remedy: str = _START) -> Iterator[None]:
    """Turn what the client raises into the one line and exit code of every command.

    Args: remedy: what to do where nobody answers.
    Raises: OutriderError.
    """
    try:
        yield
    except OutriderClientError as error:
        raise OutriderError(f"{target}: {explain(error, timeout_s, remedy)}") from error


def explain(error: OutriderClientError, timeout_s: float | None, remedy: str = _START) -> str:
    """The error in a user's words; `timeout_s` is what --timeout asked for."""
    text = str(error)
    match error:
        case DeadlineExceededError() if timeout_s is not None:
            return f"no complete answer within --timeout {timeout_s:g} s"
        case UnavailableError() if text.startswith(_NO_CONNECTION):
            reason = text.rpartition("error: ")[2]
            return f"cannot connect ({reason}); is a server running there? {remedy}"
        case UnavailableError():
            return f"the server shut down or was lost before the answer ended ({text})"
    return text
