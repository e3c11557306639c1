"""How both clients connect, and the health protocol's two messages."""

import math
import time

import grpc

from clients.errors import DeadlineExceededError, InvalidRequestError


def channel_options(*, connect_s: float, ping_after_s: float, ping_timeout_s: float) -> tuple[tuple[str, int], ...]:
    """How to connect.

    Args:
        connect_s: how long a server may take to say its first word.
        ping_after_s: how long it may be silent during a call until it is asked whether it is there, and
            ping_timeout_s: then: one that hangs, or whose machine vanished, ends the call instead of leaving it so.
    """
    return (
        # The server bounds what it sends; the client's default of 4 MiB would refuse answers the server allows.
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        # A server that comes back is found within two seconds, not two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.min_reconnect_backoff_ms", int(1000 * connect_s)),  # a time to connect, for all its name
        ("grpc.keepalive_time_ms", int(1000 * ping_after_s)),
        ("grpc.keepalive_timeout_ms", int(1000 * ping_timeout_s)),
        ("grpc.http2.ping_timeout_ms", int(1000 * ping_timeout_s)),  # without it, the one above is at least a minute
        ("grpc.http2.max_pings_without_data", 0),  # else it asks twice, and never again while a prompt is computed
    )


CHANNEL_OPTIONS = channel_options(connect_s=20, ping_after_s=30, ping_timeout_s=20)
"""Where there is nobody else to ask."""

# grpc.health.v1 by hand, so that no further package is needed: an empty request asks for the
# whole server, and field 1 = 1 answers SERVING.
HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
HEALTH_REQUEST = b""
HEALTH_SERVING = b"\x08\x01"

NO_ANSWER = "no answer"
NOT_SERVING = "the server is up but not serving"


def not_ready(target: str, timeout_s: float | None, last: str) -> DeadlineExceededError:
    """The error of a wait that ended too early; `last` is what was last heard from there."""
    within = "in time" if timeout_s is None else f"within {timeout_s:g} s"
    return DeadlineExceededError(f"{target} was not ready {within}: {last}", grpc.StatusCode.DEADLINE_EXCEEDED)


MAX_TIMEOUT_S = 1e8
"""Three years. A longer time is as good as none; from 300 on, gRPC's would end at once."""


class Deadline:
    """A point in time that all attempts of one call share."""

    def __init__(self, timeout_s: float | None) -> None:
        """Raises: InvalidRequestError for what is no number."""
        given: object = timeout_s
        if given is not None and not (isinstance(given, int | float) and not math.isnan(given)):
            raise InvalidRequestError.of("timeout_s", f"must be a number of seconds or None, got {timeout_s!r}")
        has_end = timeout_s is not None and timeout_s <= MAX_TIMEOUT_S
        self._end_s = time.monotonic() + timeout_s if timeout_s is not None and has_end else None

    def remaining_s(self) -> float | None:
        """Seconds left, at least 0; None if there is no deadline."""
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())
