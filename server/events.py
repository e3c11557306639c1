"""Small facts that the step loop and the front publish; telemetry subscribes.

Subscribers are called where the event happens and must return at once. StepFinished
comes from the step thread, everything else from the event loop.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from server.engine.protocol import Finished


@dataclass(frozen=True, slots=True)
class StepFinished:
    """One step has settled; `duration_s` runs from launch to settle.

    `lock_wait_s` is what the step thread lost to the interpreter lock since the step before, waits for
    requests left out: an upper bound, see server/engine/lock_wait.py. `draft_s` went into proposing drafts;
    `verify_s` is the rest of a step that verified some, without what it overlaps with the step before, else 0.
    """

    duration_s: float
    num_rows: int
    num_query_tokens: int
    num_generated_tokens: int
    lock_wait_s: float
    draft_s: float = 0.0
    verify_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokensStreamed:
    """A message with tokens is about to leave for the client.

    `gap_s` is the time since the previous message of the same choice, None for the first.
    `num_tokens` came together (an accepted run): spread the gap over them.
    """

    request_id: str
    index: int
    num_tokens: int
    gap_s: float | None


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A gRPC call has ended, one event per call whatever its outcome.

    Attributes:
        method: such as "Generate". service: it belongs to.
        metadata: the caller's metadata, keys in lower case, text values only.
        status: the gRPC status code's name, such as "OK" or "CANCELLED".
        error: what went wrong, empty if nothing did.
        start_unix_ns, end_unix_ns: wall-clock bounds of the call.
        request_id: empty where the call has none.
        choices: the Finished event of each choice that ended.
        num_prompt_tokens, num_completion_tokens: over all choices.
        attributes: further facts in OpenTelemetry attribute names (sampling parameters and the like).
    """

    method: str
    metadata: Mapping[str, str]
    status: str
    error: str
    start_unix_ns: int
    end_unix_ns: int
    request_id: str
    choices: tuple[Finished, ...]
    num_prompt_tokens: int
    num_completion_tokens: int
    attributes: Mapping[str, str | int | float | bool]
    service: str = "outrider.v1.Inference"


Event = StepFinished | TokensStreamed | CallFinished


class EventBus:
    """Calls each subscriber with each event, in order; owned by compose.py, lives as long as the process.

    Subscribe before the engine starts; publish from any thread.
    """

    def __init__(self) -> None:
        self._subscribers: list[Callable[[Event], None]] = []

    def subscribe(self, subscriber: Callable[[Event], None]) -> None:
        """Add a subscriber; it must be quick, thread-safe, and must not raise."""
        self._subscribers.append(subscriber)

    def publish(self, event: Event) -> None:
        """Tell every subscriber."""
        for subscriber in self._subscribers:
            subscriber(event)
