"""What a generation yields, as plain values, and the whole that its parts add up to."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import logprobs_pb2

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
    pb.FINISH_REASON_HANDED_ON: "handed_on",
}


@dataclass(frozen=True, slots=True)
class Started:
    """The server has begun with the request."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its natural-log probability under the raw distribution, and its rank there from 1."""

    token_id: int
    logprob: float
    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token at a position and the likeliest ones there, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of the prompt from the second token on; a long prompt's come in parts."""

    positions: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """More tokens of one choice; `logprobs` has one entry per token where asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of one choice on the server, in seconds.

    `transfer_seconds` is the part of the queue in which KV came from elsewhere; behind a hop, on the decode node, where
    it is a part of decode.
    """

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    time_to_first_token_seconds: float
    total_seconds: float
    transfer_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What speculation did for one choice.

    Attributes:
        num_spec_steps: steps that verified draft tokens.
        mean_acceptance_length: tokens that such a step yields; 0 if there was none.
        draft_acceptance_rate: the share of draft tokens that were accepted; 0 if there was none.
        acceptance_histogram: such steps by how many drafts they accepted: none, 1, 2, ...
        proposed_per_step, accepted_per_step: of each such step, where `speculation_metrics` was "detailed".
        is_synthetic: whether drafts were accepted at configured rates; then the output is not the model's.
    """

    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float = 0.0
    draft_acceptance_rate: float = 0.0
    acceptance_histogram: tuple[int, ...] = ()
    proposed_per_step: tuple[int, ...] = ()
    accepted_per_step: tuple[int, ...] = ()
    is_synthetic: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """One choice has ended.

    `finish_reason` is "stop", "length", "abort" or, of a choice that another node is to go on with, "handed_on";
    `stop_reason` the matched token id or string.
    """

    index: int
    finish_reason: str
    stop_reason: int | str | None
    usage: Usage
    timing: Timing
    speculation: SpeculationStats


Event = Started | PromptLogprobs | Delta | Finished


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole continuation."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finished: Finished


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """Everything one request produced. `prompt_logprobs` has no entry for the first token."""

    started: Started | None
    prompt_logprobs: tuple[PositionLogprobs, ...]
    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass(slots=True)
class _Parts:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finished: Finished | None = None


class OutputBuilder:
    """Takes the messages of one stream and joins them; owned by the stream's reader."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.prompt_logprobs: tuple[PositionLogprobs, ...] = ()
        self._parts: dict[int, _Parts] = {}

    def add(self, message: pb.GenerateResponse) -> Event | None:
        """Take one message and say it as a value; None if a newer server says something unknown."""
        event = event_from_proto(message)
        match event:
            case Started():
                self.started = event
            case PromptLogprobs():
                self.prompt_logprobs += event.positions
            case Delta():
                part = self._part(event.index)
                part.texts.append(event.text)
                part.token_ids.extend(event.token_ids)
                part.logprobs.extend(event.logprobs)
            case Finished():
                self._part(event.index).finished = event
        return event

    @property
    def finished(self) -> dict[int, Finished]:
        """The choices that have ended, by index."""
        return {index: part.finished for index, part in sorted(self._parts.items()) if part.finished is not None}

    def output(self) -> GenerationOutput:
        """The whole, as far as choices have ended."""
        choices = tuple(
            Choice(index, "".join(part.texts), tuple(part.token_ids), tuple(part.logprobs), part.finished)
            for index, part in sorted(self._parts.items())
            if part.finished is not None
        )
        return GenerationOutput(self.started, self.prompt_logprobs, choices)

    def _part(self, index: int) -> _Parts:
        return self._parts.setdefault(index, _Parts())


def event_from_proto(message: pb.GenerateResponse) -> Event | None:
    """One message of the stream as a value."""
    match message.WhichOneof("event"):
        case "started":
            started = message.started
            return Started(started.request_id, started.prompt_tokens, started.cached_tokens)
        case "prompt_logprobs":
            return PromptLogprobs(_positions(message.prompt_logprobs.positions))
        case "delta":
            delta = message.delta
            return Delta(delta.index, delta.text, tuple(delta.token_ids), _positions(delta.logprobs))
        case "finished":
            return _finished(message.finished)
    return None


def _token(message: logprobs_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob, message.rank, message.text)


def _positions(messages: Iterable[logprobs_pb2.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    return tuple(PositionLogprobs(_token(item.chosen), tuple(map(_token, item.top))) for item in messages)


def _finished(message: pb.Finished) -> Finished:
    stop_field = message.WhichOneof("stop_reason")
    return Finished(
        index=message.index,
        finish_reason=_FINISH_REASONS.get(message.finish_reason, "unknown"),
        stop_reason=None if stop_field is None else getattr(message, stop_field),
        usage=Usage(message.usage.prompt_tokens, message.usage.completion_tokens, message.usage.cached_tokens),
        timing=Timing(
            message.timing.queue_seconds,
            message.timing.prefill_seconds,
            message.timing.decode_seconds,
            message.timing.time_to_first_token_seconds,
            message.timing.total_seconds,
            message.timing.transfer_seconds,
        ),
        speculation=SpeculationStats(
            message.speculation.num_spec_steps,
            message.speculation.num_draft_tokens,
            message.speculation.num_accepted_draft_tokens,
            message.speculation.mean_acceptance_length,
            message.speculation.draft_acceptance_rate,
            tuple(message.speculation.acceptance_histogram),
            tuple(message.speculation.proposed_per_step),
            tuple(message.speculation.accepted_per_step),
            message.speculation.is_synthetic,
        ),
    )
