"""What the front may ask of an engine, and the values that come back.

Our own engine and a foreign one (vLLM's) implement the same protocol. Only plain
values cross it.
"""

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from server.kv_handle import ChoiceState, KVHandle
from server.request import ModelInfo, Request
from server.speculation_state import SpeculationChange, SpeculationState
from server.token_logprobs import PositionLogprobs as PositionLogprobs
from server.token_logprobs import TokenLogprob as TokenLogprob


class FinishReason(enum.Enum):
    """Why a choice ended; the value is the word clients see."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    HANDED_ON = "handed_on"


@dataclass(frozen=True, slots=True)
class Started:
    """The request was scheduled for the first time.

    Attributes: prompt_token_ids: of a request that is handed on; whoever goes on with it needs the same ones.
    """

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """One entry per prompt token from the second on."""

    positions: tuple[PositionLogprobs, ...]


@dataclass(slots=True)  # not frozen: there is one per token, and it would take three times as long to make
class Delta:
    """More tokens of one choice; `logprobs` is empty or has one entry per token."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of one choice in seconds; zero for phases that were never reached.

    queue: arrival to first scheduled; prefill: to the first token; decode: first token to last. transfer: the part of
    the queue in which KV came from elsewhere.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What speculation did for one choice.

    Attributes:
        num_spec_steps: steps that verified drafts.
        acceptance_histogram: those by how many they accepted, from 0 to the request's most; empty if it had none.
        proposed_per_step, accepted_per_step: drafts of each such step, where the request wants to know.
        is_synthetic: whether drafts were accepted at configured rates, whatever the model said.
        draft_s: how long the steps that the choice was in spent proposing drafts, for all that was in them.
        verify_s: how long those of them took besides that verified drafts of it.
    """

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    proposed_per_step: tuple[int, ...] = ()
    accepted_per_step: tuple[int, ...] = ()
    is_synthetic: bool = False
    draft_s: float = 0.0
    verify_s: float = 0.0

    @property
    def num_speculative_tokens(self) -> int:
        """The most drafts that a step of it could have; 0 if it was not to be drafted for."""
        return max(0, len(self.acceptance_histogram) - 1)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a step with drafts yields; 0 if there was none."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """The share of drafts that were accepted; 0 if there was none."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """One choice has ended.

    Attributes:
        stop_reason: the matched id or string, None otherwise.
        handed_on: of a choice that ends as HANDED_ON, how far it has come. source: and where the prompt's KV is; None
            if it is not held.
    """

    index: int
    finish_reason: FinishReason
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    timing: Timing
    speculation: SpeculationStats
    handed_on: ChoiceState | None = None
    source: KVHandle | None = None


StreamEvent = Started | PromptLogprobs | Delta | Finished


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A snapshot; counters count since the start. See GetStatsResponse for each field."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    draft_tokens_per_position: tuple[int, ...] = field(default=())
    accepted_tokens_per_position: tuple[int, ...] = field(default=())
    steps_per_draft_limit: tuple[int, ...] = ()
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    num_draft_steps: int = 0
    num_verify_steps: int = 0
    external_queried_tokens: int = 0
    external_loaded_tokens: int = 0
    num_failed_loads: int = 0
    num_unsaved_blocks: int = 0
    save_failures: Mapping[str, int] = field(default_factory=dict)
    num_unreadable_handles: int = 0
    num_held_blocks: int = 0
    speculation_advice: Mapping[str, str] = field(default_factory=dict)

    @property
    def draft_acceptance_rate(self) -> float:
        """The share of verified draft tokens that were accepted; 0 if there was none."""
        num_drafted = sum(self.draft_tokens_per_position)
        return sum(self.accepted_tokens_per_position) / num_drafted if num_drafted else 0.0


class RequestStream(Protocol):
    """The events of one live request; consumed by one task on the event loop.

    Iteration ends after the last choice's Finished, or raises an OutriderError. A slow
    reader gets fewer, larger deltas and never slows the engine.
    """

    @property
    def request_id(self) -> str:
        """The id the stream was opened with."""

    @property
    def finished(self) -> Sequence[Finished]:
        """How every choice ended so far, delivered or not; those of a request that broke off included."""

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        """Iterates over the events, once."""


class Engine(Protocol):
    """An engine as the front sees it. All methods run on the event loop unless they say otherwise, and never block."""

    @property
    def model_info(self) -> ModelInfo:
        """The loaded model and its limits; of speculation what holds now."""

    @property
    def speculation(self) -> SpeculationState:
        """What holds of speculation from the next step on."""

    async def set_speculation(self, change: SpeculationChange) -> SpeculationState:
        """Change speculation between two steps, all of it or none; what is generated is the same.

        Returns: what holds now.
        Raises: InvalidRequest, EngineDead.
        """

    def open(self, request_id: str, *, deadline_s: float | None = None) -> RequestStream:
        """Reserve the id and a place in the queue, before tokenising.

        Every opened stream must be closed: by reading it to its end, or by abort().
        Raises: DuplicateRequest, Overloaded, EngineDead.
        """

    def submit(self, stream: RequestStream, request: Request) -> None:
        """Hand over the tokenised request of an opened stream; ignored once that was aborted."""

    def abort(self, request_id: str) -> bool:
        """End a live request; idempotent. Its stream closes with finish reason ABORT.

        Returns: whether a live request of that id was found.
        """

    def release(self, request_id: str) -> None:
        """Nobody goes on with what was handed on of a request: let go what is held for it. Ignores unknown ids."""

    def statistics(self) -> EngineStatistics:
        """A snapshot of scheduler, cache and speculation; may be called from any thread."""

    def now(self) -> float:
        """Seconds on the engine's monotonic clock."""
