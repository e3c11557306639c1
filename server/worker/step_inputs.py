"""A step as tensors: which token of which row is where, and what is to be done with whose logits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from server.model.attention import AttentionGroup
from server.plan import PlanRow
from server.worker.buckets import Bucket
from server.worker.slot_info import SlotInfo
from server.worker.token_masks import TokenMasks


@dataclass(frozen=True, slots=True)
class Selection:
    """Some of the M sampling rows: their places on the host, and as a [n] int64 tensor."""

    index: tuple[int, ...]
    rows: Tensor
    is_all: bool

    def of(self, tensor: Tensor) -> Tensor:
        """The selected rows of an [M, ...] tensor; the tensor itself where all are selected."""
        return tensor if self.is_all else tensor[self.rows]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows of a step that yield tokens, M of them, with room for Q = 1 + drafts positions each.

    Attributes:
        rows: the plan's rows, in layout order. infos: theirs. Padding behind them has neither.
        slots: [M] int64.
        max_drafts: [M] int64, drafts the plan lets each verify.
        num_new: [M] int64, tokens a row gets besides accepted drafts: 1, or 0 for padding.
        tokens: [M * Q] int64, the flat tokens whose logits are wanted; None where it is all of them, in order.
        num_positions: Q.
        coupled, rejecting: who is sampled with noise at each position, and who has drafts and no seed, so that
            rejection sampling will do with less; see Sampler.
        penalised, reporting: who they are, see SlotInfo. None where nobody is.
        num_proposed: most new drafts of a row; 0 where nobody gets any.
        is_captured: whether these stand for whatever rows a captured segment is replayed for.
        masks: of those that follow a grammar; None where nobody does.
    """

    rows: tuple[PlanRow, ...]
    infos: tuple[SlotInfo, ...]
    slots: Tensor
    max_drafts: Tensor
    num_new: Tensor
    tokens: Tensor | None
    num_positions: int
    coupled: Selection | None
    rejecting: Selection | None
    penalised: Selection | None
    reporting: Selection | None
    num_proposed: int
    is_captured: bool
    masks: TokenMasks | None = None

    def of(self, hidden: Tensor) -> Tensor:
        """Of [T, hidden], what the logits are made of: [M, Q, hidden]."""
        num_rows = self.slots.shape[0]
        wanted = hidden[: num_rows * self.num_positions] if self.tokens is None else hidden[self.tokens]
        return wanted.view(num_rows, self.num_positions, -1)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The layout of a step: N rows, T flat tokens.

    Attributes:
        rows: the plan's rows in layout order.
        bucket: the captured shape it is padded to; None where none fits.
        slots, first_token, num_query: [N] int64; where a row's tokens begin and how many it has, 0 for padding.
        first_tokens: `first_token` on the host.
        token_slot, token_offset: [T] int64, whose token it is and its place in the row, or PADDING.
        is_followed: whether proposers do this step's tokens.
        known_row: [T] int64, the row of tokens that cannot be drafts, N for others; None where every row has one
            such token and samples.
        chunk: [N] int64, query tokens of rows that do not sample, 0 for those that do; None as above.
    """

    rows: tuple[PlanRow, ...]
    bucket: Bucket | None
    groups: tuple[AttentionGroup, ...]
    slots: Tensor
    first_token: Tensor
    num_query: Tensor
    first_tokens: Sequence[int]
    token_slot: Tensor
    token_offset: Tensor
    known_row: Tensor | None
    chunk: Tensor | None
    sampling: SamplingRows | None
    is_followed: bool = False

    def drafting(self, num_proposed: int) -> "StepInputs":
        """The same for a step whose rows get at most so many new drafts."""
        sampling = None if self.sampling is None else replace(self.sampling, num_proposed=num_proposed)
        return replace(self, sampling=sampling, is_followed=num_proposed > 0)

    def masked(self, masks: TokenMasks | None) -> "StepInputs":
        """The same with masks for its guided rows; itself where there are none."""
        if masks is None:
            return self
        assert self.sampling is not None
        return replace(self, sampling=replace(self.sampling, masks=masks))
