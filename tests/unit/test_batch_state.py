"""The batch's tensors, and how a plan is laid out over them."""

from dataclasses import replace

import torch

from server.plan import PlanRow
from server.request import SamplingParams
from tests.fakes.worker_state import batch_of, decode_row, inputs_of, start


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
    batch.start([second])
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
    with_blocks = [replace(row, new_block_ids=new) for row, new in zip(rows, [(8, 9), ()], strict=True)]
    batch.append_blocks(with_blocks)
    batch.append_blocks([replace(rows[1], new_block_ids=(7,))])
    batch.append_blocks(rows)
    assert batch.block_table.tolist() == [[3, 8, 9, 0], [4, 5, 7, 0]]


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
    assert inputs.first_tokens == (0, 3, 6, 13, 25)
    assert inputs.token_row.tolist() == [0] * 3 + [1] * 3 + [2] * 7 + [3] * 12 + [4] * 12
    assert inputs.token_offset[:13].tolist() == [0, 1, 2, 0, 1, 2, *range(7)]
    assert inputs.chunk.tolist() == [0, 0, 7, 0, 0]
    assert inputs.num_known.tolist() == [1, 1, 7, 12, 12]
    sampling = inputs.sampling
    assert sampling is not None
    assert sampling.slots.tolist() == [3, 1, 0, 4]
    # Logits start at the last known token, and go on over the drafts.
    assert sampling.first_token.tolist() == [0, 3, 24, 36]
    assert sampling.last_token.tolist() == [0, 5, 24, 36]
    assert sampling.max_drafts.tolist() == [0, 2, 0, 0]
    assert sampling.num_positions == 3


def test_a_step_without_a_sampling_row_has_no_sampling(device_name: str) -> None:
    starts = [start(0, range(20))]
    assert inputs_of([chunk_row(0, 7, is_sampling=False)], starts, device_name).sampling is None


def test_rows_are_selected_by_how_they_are_sampled(device_name: str) -> None:
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(logprobs=0),
        SamplingParams(temperature=0, seed=1, frequency_penalty=1),
    ]
    starts = [start(slot, [1, 2], sampling=p, num_speculative_tokens=slot % 2) for slot, p in enumerate(params)]
    sampling = inputs_of([decode_row(slot, 2, 0) for slot in range(4)], starts, device_name).sampling
    assert sampling is not None
    selections = {
        name: selection and selection.index
        for name in ("greedy", "seeded", "unseeded", "penalised", "reporting", "drafting")
        for selection in [getattr(sampling, name)]
    }
    assert selections == {
        "greedy": (0, 3),
        "seeded": (1,),
        "unseeded": (2,),
        "penalised": (3,),
        "reporting": (2,),
        "drafting": (1, 3),
    }
    assert sampling.greedy is not None
    assert sampling.greedy.of(torch.arange(4, device=device_name)).tolist() == [0, 3]
