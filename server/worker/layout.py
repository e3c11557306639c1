"""Lays a plan out as tensors.

Everything a step needs to know of its plan is put into its flight here, so that what follows is a
function of tensors alone.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
from torch import Tensor

from server.model.attention import AttentionGroup
from server.plan import PlanRow
from server.worker.buckets import Bucket, Buckets
from server.worker.flight import Flight
from server.worker.slot_info import SlotInfo
from server.worker.step_inputs import SamplingRows, Selection, StepInputs

PADDING = 1 << 40
"""The offset of a token that is none: beyond what any row knows."""


def lay_out(rows: Sequence[PlanRow], slots: Mapping[int, SlotInfo], buckets: Buckets, flight: Flight) -> StepInputs:
    """Lay out a plan's rows."""
    if all(row.is_sampling and row.num_query == 1 + row.num_drafts for row in rows):
        num_query = max([row.num_query for row in rows])
        return lay_out_decoding(rows, slots, buckets, flight, buckets.fit(len(rows), num_query))
    return _lay_out_mixed(rows, slots, buckets, flight)


def lay_out_decoding(
    rows: Sequence[PlanRow],
    slots: Mapping[int, SlotInfo],
    buckets: Buckets,
    flight: Flight,
    bucket: Bucket | None,
) -> StepInputs:
    """Lay out rows that decode or verify: all alike, in one group, padded to a bucket if there is one for them."""
    shape = bucket or Bucket(len(rows), max([row.num_query for row in rows]))
    num_rows, num_query = shape.num_rows, shape.num_query
    padding = [0] * (num_rows - len(rows))
    slot_ids = np.array([row.slot for row in rows] + [buckets.spare_slot] * len(padding), np.int64)
    counts = np.array([row.num_query for row in rows] + padding, np.int64)
    slots_tensor, num_query_tensor = flight.put(slot_ids), flight.put(counts)
    first_tokens = range(0, num_rows * num_query, num_query)
    infos = [slots[row.slot] for row in rows]
    is_captured = bucket is not None and buckets.is_second_captured and all(info.is_plain for info in infos)
    num_sampled = num_rows if is_captured else len(rows)  # what is sampled by itself leaves the padding out
    bound = max([row.context_bound for row in rows]) if bucket is None else buckets.max_context
    return StepInputs(
        rows=tuple(rows),
        bucket=bucket,
        groups=(AttentionGroup(0, num_rows, 0, num_query, bound),),
        slots=slots_tensor,
        num_query=num_query_tensor,
        first_token=flight.put(first_tokens),
        first_tokens=first_tokens,
        token_slot=slots_tensor if num_query == 1 else flight.put(slot_ids.repeat(num_query)),
        token_offset=flight.put(_offsets(counts, num_query)),
        known_row=None,
        chunk=None,
        sampling=_sampling_rows(
            rows,
            infos,
            slots=slots_tensor[:num_sampled],
            max_drafts=flight.put(np.maximum(counts - 1, 0)[:num_sampled]),
            num_new=flight.put(np.minimum(counts, 1)[:num_sampled]),
            tokens=None,
            num_positions=num_query,
            flight=flight,
            is_captured=is_captured,
        ),
    )


def _lay_out_mixed(
    rows: Sequence[PlanRow], slots: Mapping[int, SlotInfo], buckets: Buckets, flight: Flight
) -> StepInputs:
    """Lay out any rows: those short enough to be a verification share a group, each longer length has its own."""
    ordered = sorted(rows, key=lambda row: row.num_query)
    num_rows = len(ordered)
    groups: list[AttentionGroup] = []
    first_tokens: list[int] = []
    token_slot: list[npt.NDArray[np.int64]] = []
    token_offset: list[npt.NDArray[np.int64]] = []
    known_row: list[npt.NDArray[np.int64]] = []
    num_tokens = 0
    for _, members in groupby(ordered, key=lambda row: max(buckets.max_query, row.num_query)):
        group = list(members)
        num_query = group[-1].num_query
        first_row = len(first_tokens)
        groups.append(
            AttentionGroup(first_row, len(group), num_tokens, num_query, max(row.context_bound for row in group))
        )
        end = num_tokens + len(group) * num_query
        first_tokens += range(num_tokens, end, num_query)
        num_tokens = end
        counts = np.array([row.num_query for row in group])
        known = counts - np.array([row.num_drafts for row in group])
        token_slot.append(np.array([row.slot for row in group]).repeat(num_query))
        token_offset.append(_offsets(counts, num_query))
        row_ids = np.arange(first_row, first_row + len(group))
        known_row.append(np.where(_offsets(known, num_query) < PADDING, row_ids.repeat(num_query), num_rows))
    return StepInputs(
        rows=tuple(ordered),
        bucket=None,
        groups=tuple(groups),
        slots=flight.put([row.slot for row in ordered]),
        first_token=flight.put(first_tokens),
        first_tokens=first_tokens,
        num_query=flight.put([row.num_query for row in ordered]),
        token_slot=flight.put(np.concatenate(token_slot)),
        token_offset=flight.put(np.concatenate(token_offset)),
        known_row=flight.put(np.concatenate(known_row)),
        chunk=flight.put([0 if row.is_sampling else row.num_query for row in ordered]),
        sampling=_sampling_rows_among(ordered, slots, first_tokens, flight),
    )


def _offsets(counts: npt.NDArray[np.int64], num_query: int) -> npt.NDArray[np.int64]:
    """[rows] token counts -> [rows * num_query] the place of each flat token in its row, PADDING behind them."""
    place = np.arange(num_query)
    return np.where(place < counts[:, None], place, PADDING).ravel()


def _sampling_rows_among(
    ordered: Sequence[PlanRow], slots: Mapping[int, SlotInfo], first_tokens: Sequence[int], flight: Flight
) -> SamplingRows | None:
    """The sampling rows of a mixed layout."""
    index = [i for i, row in enumerate(ordered) if row.is_sampling]
    if not index:
        return None
    rows = [ordered[i] for i in index]
    num_drafts = np.array([row.num_drafts for row in rows])
    num_positions = 1 + int(num_drafts.max())
    last = np.array([first_tokens[i] + ordered[i].num_query - 1 for i in index])
    tokens = np.minimum((last - num_drafts)[:, None] + np.arange(num_positions), last[:, None])
    return _sampling_rows(
        rows,
        [slots[row.slot] for row in rows],
        slots=flight.put([row.slot for row in rows]),
        max_drafts=flight.put(num_drafts),
        num_new=flight.put(np.ones_like(num_drafts)),
        tokens=flight.put(tokens.ravel()),
        num_positions=num_positions,
        flight=flight,
    )


def _sampling_rows(
    rows: Sequence[PlanRow],
    infos: Sequence[SlotInfo],
    *,
    slots: Tensor,
    max_drafts: Tensor,
    num_new: Tensor,
    tokens: Tensor | None,
    num_positions: int,
    flight: Flight,
    is_captured: bool = False,
) -> SamplingRows:
    def select(flags: Sequence[bool]) -> Selection | None:
        chosen = tuple([i for i, flag in enumerate(flags) if flag])
        return Selection(chosen, flight.put(chosen), len(chosen) == len(flags)) if chosen else None

    is_alone = num_positions == 1
    return SamplingRows(
        rows=tuple(rows),
        infos=tuple(infos),
        slots=slots,
        max_drafts=max_drafts,
        num_new=num_new,
        tokens=tokens,
        num_positions=num_positions,
        coupled=None if is_captured else select([info.is_seeded or (info.is_noisy and is_alone) for info in infos]),
        rejecting=None if is_captured or is_alone else select([info.is_noisy > info.is_seeded for info in infos]),
        penalised=None if is_captured else select([info.is_penalised for info in infos]),
        reporting=None if is_captured else select([info.is_reporting for info in infos]),
        num_proposed=0,
        is_captured=is_captured,
    )
