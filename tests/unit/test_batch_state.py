"""The batch's tensors, and how a plan is laid out over them."""

from typing import Any

import pytest
import torch

from server.plan import PlanRow
from server.request import SamplingParams
from server.worker.buckets import Buckets, batch_sizes
from server.worker.layout import PADDING
from server.worker.slot_info import SlotInfo
from tests.fakes.worker_state import MAX_CONTEXT, batch_of, change, decode_row, inputs_of, start


def chunk_row(slot: int, num_query: int, *, is_sampling: bool) -> PlanRow:
    """A row of a prompt."""
    return PlanRow(
        slot=slot,
        seq_id=slot,
        epoch=0,
        num_query=num_query,
        num_drafts=0,
        context_bound=num_query,
        is_sampling=is_sampling,
    )


def test_a_slot_is_filled_from_a_start_and_keeps_nothing_of_its_last_owner(device_name: str) -> None:
    first = start(0, range(40), block_ids=(5, 6, 7))
    sampling = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, min_tokens=3, presence_penalty=1.5)
    second = start(
        0, [9, 8, 7], num_prompt=2, sampling=sampling, key=2**63 - 1, block_ids=(4,), num_speculative_tokens=2
    )
    batch = batch_of([first], device_name)
    change(batch, [second])
    assert batch.token_ids[0, :3].tolist() == [9, 8, 7]
    assert batch.block_table[0].tolist() == [4, 0, 0, 0]
    facts = {
        "num_tokens": 3,
        "num_computed": 2,
        "num_drafts": 0,
        "num_prompt": 2,
        "first_stop": 5,
        "key": 2**63 - 1,
        "top_k": 7,
        "temperature": 0.5,
        "top_p": 0.25,
        "min_p": 0.125,
        "presence_penalty": 1.5,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "max_drafts": 2,
    }
    assert {name: getattr(batch, name)[0].item() for name in facts} == facts


def test_blocks_are_appended_behind_those_a_slot_has(device_name: str) -> None:
    starts = [start(0, [1, 2], block_ids=(3,)), start(1, [1, 2], block_ids=(4, 5))]
    batch = batch_of(starts, device_name)
    rows = [decode_row(0, 2, 0), decode_row(1, 2, 0)]
    with_blocks = [row._replace(new_block_ids=new) for row, new in zip(rows, [(8, 9), ()], strict=True)]
    change(batch, rows=with_blocks)
    change(batch, rows=[rows[1]._replace(new_block_ids=(7,))])
    change(batch, rows=rows)
    assert batch.block_table[:2].tolist() == [[3, 8, 9, 0], [4, 5, 7, 0]]


def test_short_rows_share_a_padded_group_and_each_longer_length_has_its_own(device_name: str) -> None:
    starts = [start(slot, range(20)) for slot in range(5)]
    rows = [
        chunk_row(0, 12, is_sampling=True),
        decode_row(1, 20, 2),
        chunk_row(2, 7, is_sampling=False),
        decode_row(3, 20, 0),
        chunk_row(4, 12, is_sampling=True),
    ]
    inputs = inputs_of(rows, starts, device_name, max_drafts=4)
    assert [row.slot for row in inputs.rows] == [3, 1, 2, 0, 4]
    assert [(group.num_rows, group.num_query) for group in inputs.groups] == [(2, 3), (1, 7), (2, 12)]
    assert list(inputs.first_tokens) == inputs.first_token.tolist() == [0, 3, 6, 13, 25]
    assert inputs.num_query.tolist() == [1, 3, 7, 12, 12]
    assert inputs.token_slot.tolist() == [3] * 3 + [1] * 3 + [2] * 7 + [0] * 12 + [4] * 12
    assert inputs.token_offset.tolist() == [0, PADDING, PADDING, 0, 1, 2, *range(7), *range(12), *range(12)]
    assert inputs.known_row is not None
    assert inputs.known_row.tolist() == [0, 5, 5, 1, 5, 5] + [2] * 7 + [3] * 12 + [4] * 12
    assert inputs.chunk is not None
    assert inputs.chunk.tolist() == [0, 0, 7, 0, 0]
    sampling = inputs.sampling
    assert sampling is not None
    assert sampling.slots.tolist() == [3, 1, 0, 4]
    # Logits start at the last known token, and go on over the drafts.
    assert sampling.tokens is not None
    assert sampling.tokens.tolist() == [0, 0, 0, 3, 4, 5, 24, 24, 24, 36, 36, 36]
    assert sampling.max_drafts.tolist() == [0, 2, 0, 0]
    assert sampling.num_positions == 3
    assert sampling.num_new.tolist() == [1] * 4


def test_rows_that_only_decode_are_laid_out_as_they_come(device_name: str) -> None:
    starts = [start(slot, range(20)) for slot in range(3)]
    rows = [decode_row(2, 20, 2), decode_row(0, 20, 0), decode_row(1, 20, 1)]
    inputs = inputs_of(rows, starts, device_name, max_drafts=4)
    assert [row.slot for row in inputs.rows] == inputs.slots.tolist() == [2, 0, 1]
    assert [(group.num_rows, group.num_query) for group in inputs.groups] == [(3, 3)]
    assert inputs.bucket is None
    assert inputs.known_row is None
    assert inputs.chunk is None
    assert inputs.first_token.tolist() == [0, 3, 6]
    assert inputs.token_slot.tolist() == [2] * 3 + [0] * 3 + [1] * 3
    assert inputs.token_offset.tolist() == [0, 1, 2, 0, PADDING, PADDING, 0, 1, PADDING]
    assert inputs.sampling is not None
    assert inputs.sampling.max_drafts.tolist() == [2, 0, 1]
    hidden = torch.arange(9.0, device=device_name)[:, None]
    assert inputs.sampling.of(hidden).tolist() == hidden.view(3, 3, 1).tolist()


@pytest.mark.parametrize(("num_drafts", "num_query"), [(0, 1), (1, 5)])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_rows_are_padded_to_a_bucket(device_name: str, num_drafts: int, num_query: int, logprobs: int | None) -> None:
    sampling_params = SamplingParams(temperature=0, logprobs=logprobs)
    starts = [start(slot, range(20), sampling=sampling_params) for slot in range(3)]
    rows = [decode_row(slot, 20, num_drafts) for slot in range(3)]
    inputs = inputs_of(rows, starts, device_name, max_drafts=4, sizes=(2, 4))
    assert inputs.bucket == (4, num_query)
    assert inputs.slots.tolist() == [0, 1, 2, 3]
    assert inputs.num_query.tolist() == [1 + num_drafts] * 3 + [0]
    assert inputs.token_slot.shape[0] == 4 * num_query
    assert inputs.token_offset[-num_query:].tolist() == [PADDING] * num_query
    assert inputs.groups[0].context_bound == MAX_CONTEXT
    assert inputs.sampling is not None
    # What a captured segment does not do is done for the rows alone.
    assert inputs.sampling.is_captured == (logprobs is None)
    assert inputs.sampling.num_new.tolist() == [1, 1, 1, 0] if logprobs is None else [1, 1, 1]
    assert inputs.sampling.slots.tolist() == [0, 1, 2, 3] if logprobs is None else [0, 1, 2]


def test_a_bucket_is_the_smallest_that_fits() -> None:
    buckets = Buckets(spare_slot=24, max_query=4, max_context=64, sizes=batch_sizes(24))
    assert list(buckets)[:6] == [(24, 4), (16, 4), (8, 4), (4, 4), (2, 4), (1, 4)]
    assert [buckets.fit(rows, 1) for rows in (1, 3, 17, 24, 25)] == [(1, 1), (4, 1), (24, 1), (24, 1), None]
    assert buckets.fit(5, 2) == (8, 4)
    assert batch_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert batch_sizes(4096)[-4:] == [192, 256, 384, 512]


def test_a_step_without_a_sampling_row_has_no_sampling(device_name: str) -> None:
    starts = [start(0, range(20))]
    assert inputs_of([chunk_row(0, 7, is_sampling=False)], starts, device_name).sampling is None


@pytest.mark.parametrize("num_drafts", [0, 1])
def test_rows_are_selected_by_what_is_done_to_them(device_name: str, num_drafts: int) -> None:
    params = [
        SamplingParams(temperature=0, top_k=2),
        SamplingParams(seed=1),
        SamplingParams(logprobs=0, top_p=0.5),
        SamplingParams(temperature=0, seed=1, frequency_penalty=1),
    ]
    starts = [start(slot, [1, 2], sampling=p, num_speculative_tokens=slot % 2) for slot, p in enumerate(params)]
    sampling = inputs_of([decode_row(slot, 2, num_drafts) for slot in range(4)], starts, device_name).sampling
    assert sampling is not None
    selections = {
        name: selection and selection.index
        for name in ("coupled", "rejecting", "penalised", "reporting")
        for selection in [getattr(sampling, name)]
    }
    assert selections == {
        "coupled": (1,) if num_drafts else (1, 2),
        "rejecting": (2,) if num_drafts else None,
        "penalised": (3,),
        "reporting": (2,),
    }
    assert sampling.num_proposed == 0
    assert sampling.penalised is not None
    assert sampling.penalised.of(torch.arange(4, device=device_name)).tolist() == [3]


@pytest.mark.parametrize(
    ("params", "is_plain"),
    [
        ({"temperature": 0, "top_k": 4}, True),
        ({"seed": 1}, True),
        ({"top_p": 0.9, "repetition_penalty": 1.2}, True),
        ({"logit_bias": {1: 2.0}}, False),
        ({"allowed_token_ids": [3]}, False),
        ({"min_tokens": 2}, False),
        ({"logprobs": 0}, False),
    ],
    ids=str,
)
def test_plain_is_who_has_no_rules_and_reports_nothing(params: dict[str, Any], is_plain: bool) -> None:
    info = SlotInfo.of(start(0, [1, 2], sampling=SamplingParams(**params), stop_token_ids=[2]))
    assert info.is_plain == is_plain
