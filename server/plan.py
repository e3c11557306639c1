"""What crosses from scheduler to worker and back: one frozen plan and one frozen result per step.

A plan names rows and counts, never the ids of generated or draft tokens: those are known on the
device first. At pipeline depth 1 a plan is made before the previous step has settled, so its
counts are upper bounds; the device knows the true ones.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from connectors.base import Finished, TransferPlan
from server.engine.protocol import PositionLogprobs
from server.request import Request


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A sequence enters the batch, for the first time or after a preemption.

    Attributes:
        slot: its row in the worker's persistent batch state.
        key: 63 random bits, or digest of seed and choice: all its randomness follows from it.
        token_ids: prompt and settled output.
        num_prompt: how many of them are the prompt.
        num_computed: leading tokens whose KV is already in `block_ids`.
        num_speculative_tokens: most drafts to propose per step; 0 is no speculation.
    """

    slot: int
    request: Request
    key: int
    token_ids: tuple[int, ...]
    num_prompt: int
    num_computed: int
    block_ids: tuple[int, ...]
    num_speculative_tokens: int


class PlanRow(NamedTuple):
    """What one sequence does in a step; a tuple, because there are many and a tuple is made in a fifth of the time.

    Attributes:
        slot, seq_id, epoch: whose row it is; a result of an older epoch is stale.
        num_query: tokens to compute, drafts included.
        num_drafts: how many of them may be drafts, an upper bound.
        context_bound: the row reads and writes positions below this.
        is_sampling: whether the row reaches the end of what is known and yields tokens.
        new_block_ids: blocks appended to its table since its last row.
        num_prompt_logprobs: likeliest tokens to report per prompt position; None for none.
    """

    slot: int
    seq_id: int
    epoch: int
    num_query: int
    num_drafts: int
    context_bound: int
    is_sampling: bool
    new_block_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int | None = None


MAX_PROPOSED = 32
"""No proposer makes more drafts of a row in a step."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: first fill the started slots, then run the rows.

    Attributes:
        transfers: what a connector is to begin with it.
        num_proposed: most drafts of a row to propose for the step after it; more may be where that costs nothing.
    """

    starts: tuple[SequenceStart, ...]
    rows: tuple[PlanRow, ...]
    num_proposed: int = MAX_PROPOSED
    transfers: TransferPlan | None = None


class RowResult(NamedTuple):
    """What a row brought; a tuple as PlanRow is.

    Attributes:
        token_ids: accepted drafts, then one token of the target's; empty if the row did not sample.
        num_drafted: drafts that were verified.
        num_next_drafts: drafts proposed for the next step.
        logprobs: one entry per token id where asked for.
        prompt_logprobs: positions computed in this row, the target of the row's first token first.
        error: why the row is unusable, for instance NaN logits; None if it is fine.
        is_refusal: whether the request's own parameters are to blame for it.
    """

    seq_id: int
    epoch: int
    token_ids: tuple[int, ...] = ()
    num_drafted: int = 0
    num_next_drafts: int = 0
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    error: str | None = None
    is_refusal: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """The rows of a plan, settled, in any order.

    Attributes:
        draft_s: how long proposing drafts for the step after it took.
        num_caught_up: positions of earlier steps that proposers did with it; how long it took tells little then.
    """

    rows: tuple[RowResult, ...]
    draft_s: float = 0.0
    num_caught_up: int = 0


class Executor(Protocol):
    """Runs steps in the order they are launched; used from the step thread only."""

    def launch(self, plan: StepPlan) -> Any:
        """Start a step without waiting for the device; its transfers begin even if it raises.

        Returns: a handle for settle.
        """

    def settle(self, handle: Any) -> StepResult:
        """Wait for a launched step; each handle is settled once, in launch order."""


class Transferring(Protocol):
    """Moves blocks between two steps; used from the step thread only."""

    def begin_transfers(self, transfers: TransferPlan) -> None:
        """Have a connector begin what it was ordered, without a step."""

    def poll_transfers(self) -> tuple[Finished, frozenset[int]]:
        """What a connector has done since the last call, and which blocks it could not load."""
