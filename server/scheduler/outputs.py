"""What the scheduler tells the front after each settled step."""

import enum
from typing import NamedTuple

from server.engine.protocol import FinishReason, PositionLogprobs
from server.kv_handle import ChoiceState, KVHandle
from server.request import Request
from server.scheduler.sequence import Sequence
from server.scheduler.statistics import StepTime


class Failure(enum.Enum):
    """Why a request ends with an error."""

    EXPIRED = "expired"
    BROKEN = "broken"
    REFUSED = "refused"


class SequenceOutput(NamedTuple):
    """New tokens of one choice, or its end, or both; a tuple as RowResult is.

    Attributes:
        request: as it was added; after an abort its id may come again with another one.
        token_ids: in order; where `finish_reason` is set the last one completed the choice.
        scheduled_s, settled_s: when the choice was first scheduled and when this step settled, on
            the engine's clock; scheduled_s is None for a choice that never was.
        transfer_s: how much of the time before that it waited for KV from elsewhere.
        num_drafted, num_accepted: draft tokens this step verified and accepted.
        step_time: what speculation made of this step's time.
        prompt_logprobs: all of them, once, with the request's first output that has tokens.
        is_first: whether the choice had no tokens before.
        handed_on, source: see Finished; the text that was delivered is not known here.
        failure, error: set where the whole request ends with an error.
    """

    request: Request
    choice: int
    scheduled_s: float | None
    settled_s: float
    num_cached_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    step_time: StepTime = StepTime()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    handed_on: ChoiceState | None = None
    source: KVHandle | None = None
    transfer_s: float = 0.0
    is_first: bool = False
    failure: Failure | None = None
    error: str = ""

    @classmethod
    def of(cls, sequence: Sequence, now: float) -> "SequenceOutput":
        """What is known of a choice, without news."""
        return cls(
            sequence.request,
            sequence.choice,
            sequence.scheduled_s,
            now,
            sequence.num_cached_tokens,
            transfer_s=sequence.transfer_s,
        )

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id
