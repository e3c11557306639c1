"""A plan laid out as tensors: which token of which row is where."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from server.plan import PlanRow
from server.worker.transfer import Transfer


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Adjacent rows laid out with the same number of query tokens, shorter ones padded."""

    first_row: int
    num_rows: int
    first_token: int
    num_query: int
    context_bound: int


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows of a step that yield tokens, M of them, with room for Q = 1 + drafts positions each.

    Attributes:
        rows: the plan's rows, in layout order.
        row_index: [M] int64, their place in the layout. slots: [M] int64.
        first_token: [M] int64, the flat token whose logits come first. last_token: [M] int64, the row's last.
        max_drafts: [M] int64, drafts the plan lets each verify.
        num_positions: Q.
    """

    rows: tuple[PlanRow, ...]
    row_index: Tensor
    slots: Tensor
    first_token: Tensor
    last_token: Tensor
    max_drafts: Tensor
    num_positions: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The layout of a step: N rows, T flat tokens.

    Attributes:
        rows: the plan's rows in layout order: by number of query tokens.
        slots, num_query: [N] int64.
        chunk: [N] int64, query tokens of rows that do not sample, 0 for those that do.
        token_row, token_offset: [T] int64, the row a flat token belongs to and its place in it.
        first_tokens: for each row its first flat token, on the host.
    """

    rows: tuple[PlanRow, ...]
    groups: tuple[RowGroup, ...]
    slots: Tensor
    num_query: Tensor
    chunk: Tensor
    token_row: Tensor
    token_offset: Tensor
    first_tokens: tuple[int, ...]
    sampling: SamplingRows | None


def lay_out(rows: Sequence[PlanRow], max_drafts: int, transfer: Transfer) -> StepInputs:
    """Lay out a plan's rows.

    Rows that are short enough to be a verification share one group, padded to its longest; each
    longer length is a group of its own.
    """
    short = 1 + max_drafts
    ordered = tuple(sorted(rows, key=lambda row: row.num_query))
    groups: list[RowGroup] = []
    token_row: list[int] = []
    token_offset: list[int] = []
    first_tokens: list[int] = []
    for _, members in groupby(ordered, key=lambda row: max(short, row.num_query)):
        group_rows = list(members)
        num_query = max(row.num_query for row in group_rows)
        first_row = len(first_tokens)
        bound = max(row.context_bound for row in group_rows)
        groups.append(RowGroup(first_row, len(group_rows), len(token_row), num_query, bound))
        for i in range(len(group_rows)):
            first_tokens.append(len(token_row))
            token_row += [first_row + i] * num_query
            token_offset += range(num_query)
    upload = transfer.upload_ids
    return StepInputs(
        rows=ordered,
        groups=tuple(groups),
        slots=upload([row.slot for row in ordered]),
        num_query=upload([row.num_query for row in ordered]),
        chunk=upload([0 if row.is_sampling else row.num_query for row in ordered]),
        token_row=upload(token_row),
        token_offset=upload(token_offset),
        first_tokens=tuple(first_tokens),
        sampling=_sampling_rows(ordered, first_tokens, transfer),
    )


def _sampling_rows(ordered: Sequence[PlanRow], first_tokens: Sequence[int], transfer: Transfer) -> SamplingRows | None:
    index = [i for i, row in enumerate(ordered) if row.is_sampling]
    if not index:
        return None
    rows = tuple(ordered[i] for i in index)
    upload = transfer.upload_ids
    last_tokens = [first_tokens[i] + ordered[i].num_query - 1 for i in index]
    return SamplingRows(
        rows=rows,
        row_index=upload(index),
        slots=upload([row.slot for row in rows]),
        first_token=upload([last - row.num_drafts for last, row in zip(last_tokens, rows, strict=True)]),
        last_token=upload(last_tokens),
        max_drafts=upload([row.num_drafts for row in rows]),
        num_positions=1 + max(row.num_drafts for row in rows),
    )
