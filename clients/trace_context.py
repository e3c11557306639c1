"""The W3C trace context that all calls of one generation share."""

import secrets

from clients.metadata import Metadata

TRACEPARENT = "traceparent"


def with_trace_context(metadata: Metadata) -> tuple[tuple[str, str | bytes], ...]:
    """The metadata, with the caller's trace or else a new one: calls of several servers become one trace.

    A new one is marked as sampled, as nobody above it has decided otherwise.
    """
    given = tuple(metadata)
    if any(key.lower() == TRACEPARENT for key, _ in given):
        return given
    return (*given, (TRACEPARENT, _traceparent(is_sampled=True)))


def untraced() -> tuple[tuple[str, str], ...]:
    """Metadata of a call that is part of no generation: servers make no span of it, unless told to of every call."""
    return ((TRACEPARENT, _traceparent(is_sampled=False)),)


def _traceparent(*, is_sampled: bool) -> str:
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{'01' if is_sampled else '00'}"
