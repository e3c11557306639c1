"""A plan laid out as tensors: which token of which row is where.

Everything a step uploads is uploaded here, so that what follows is a function of tensors alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from server.model.attention import AttentionGroup
from server.plan import PlanRow, SequenceStart
from server.request import SamplingParams
from server.worker.transfer import Transfer


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """What the host knows of the sequence in a slot for as long as it is there."""

    params: SamplingParams
    num_prompt: int
    is_drafting: bool

    @classmethod
    def of(cls, start: SequenceStart) -> "SlotInfo":
        """The facts of a sequence that enters the batch."""
        return cls(start.request.sampling, start.num_prompt, start.num_speculative_tokens > 0)


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
        rows: the plan's rows, in layout order. params: theirs.
        slots: [M] int64.
        first_token: [M] int64, the flat token whose logits come first. last_token: [M] int64, the row's last.
        max_drafts: [M] int64, drafts the plan lets each verify.
        num_positions: Q.
        greedy, seeded, unseeded: who is sampled by which rule; None where nobody is.
        penalised, reporting, drafting: who has penalties, wants log probabilities, gets new drafts.
    """

    rows: tuple[PlanRow, ...]
    params: tuple[SamplingParams, ...]
    slots: Tensor
    first_token: Tensor
    last_token: Tensor
    max_drafts: Tensor
    num_positions: int
    greedy: Selection | None
    seeded: Selection | None
    unseeded: Selection | None
    penalised: Selection | None
    reporting: Selection | None
    drafting: Selection | None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The layout of a step: N rows, T flat tokens.

    Attributes:
        rows: the plan's rows in layout order: by number of query tokens.
        slots, num_query: [N] int64. num_known: [N] int64, query tokens that cannot be drafts.
        first_token: [N] int64, each row's first flat token; first_tokens: the same on the host.
        chunk: [N] int64, query tokens of rows that do not sample, 0 for those that do.
        token_row, token_offset: [T] int64, the row a flat token belongs to and its place in it.
    """

    rows: tuple[PlanRow, ...]
    groups: tuple[AttentionGroup, ...]
    slots: Tensor
    first_token: Tensor
    num_query: Tensor
    num_known: Tensor
    chunk: Tensor
    token_row: Tensor
    token_offset: Tensor
    first_tokens: tuple[int, ...]
    sampling: SamplingRows | None


def lay_out(rows: Sequence[PlanRow], slots: Mapping[int, SlotInfo], max_drafts: int, transfer: Transfer) -> StepInputs:
    """Lay out a plan's rows.

    Rows that are short enough to be a verification share one group, padded to its longest; each
    longer length is a group of its own.
    """
    short = 1 + max_drafts
    ordered = tuple(sorted(rows, key=lambda row: row.num_query))
    groups: list[AttentionGroup] = []
    token_row: list[int] = []
    token_offset: list[int] = []
    first_tokens: list[int] = []
    for _, members in groupby(ordered, key=lambda row: max(short, row.num_query)):
        group_rows = list(members)
        num_query = max(row.num_query for row in group_rows)
        first_row = len(first_tokens)
        bound = max(row.context_bound for row in group_rows)
        groups.append(AttentionGroup(first_row, len(group_rows), len(token_row), num_query, bound))
        for i in range(len(group_rows)):
            first_tokens.append(len(token_row))
            token_row += [first_row + i] * num_query
            token_offset += range(num_query)
    upload = transfer.upload_ids
    return StepInputs(
        rows=ordered,
        groups=tuple(groups),
        slots=upload([row.slot for row in ordered]),
        first_token=upload(first_tokens),
        num_query=upload([row.num_query for row in ordered]),
        num_known=upload([row.num_query - row.num_drafts for row in ordered]),
        chunk=upload([0 if row.is_sampling else row.num_query for row in ordered]),
        token_row=upload(token_row),
        token_offset=upload(token_offset),
        first_tokens=tuple(first_tokens),
        sampling=_sampling_rows(ordered, slots, first_tokens, transfer),
    )


def _sampling_rows(
    ordered: Sequence[PlanRow], slots: Mapping[int, SlotInfo], first_tokens: Sequence[int], transfer: Transfer
) -> SamplingRows | None:
    index = [i for i, row in enumerate(ordered) if row.is_sampling]
    if not index:
        return None
    rows = tuple(ordered[i] for i in index)
    infos = [slots[row.slot] for row in rows]
    upload = transfer.upload_ids
    last_tokens = [first_tokens[i] + ordered[i].num_query - 1 for i in index]

    def select(is_selected: Callable[[SlotInfo], bool]) -> Selection | None:
        chosen = tuple(i for i, info in enumerate(infos) if is_selected(info))
        return Selection(chosen, upload(chosen), len(chosen) == len(infos)) if chosen else None

    return SamplingRows(
        rows=rows,
        params=tuple(info.params for info in infos),
        slots=upload([row.slot for row in rows]),
        first_token=upload([last - row.num_drafts for last, row in zip(last_tokens, rows, strict=True)]),
        last_token=upload(last_tokens),
        max_drafts=upload([row.num_drafts for row in rows]),
        num_positions=1 + max(row.num_drafts for row in rows),
        greedy=select(lambda info: info.params.is_greedy),
        seeded=select(lambda info: not info.params.is_greedy and info.params.seed is not None),
        unseeded=select(lambda info: not info.params.is_greedy and info.params.seed is None),
        penalised=select(lambda info: info.params.has_penalties),
        reporting=select(lambda info: info.params.logprobs is not None),
        drafting=select(lambda info: info.is_drafting),
    )
