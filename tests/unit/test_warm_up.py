"""Which steps are run so that kernels are compiled."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from server.plan import StepPlan
from server.worker.warm_up import _load_kernels


def plans_for(*, num_slots: int, longest_chunk: int, num_blocks: int = 1000, max_drafts: int = 3) -> list[StepPlan]:
    """Of a runner of sequences of up to 5,000 tokens, in blocks of 16."""
    plans: list[StepPlan] = []
    runner: Any = SimpleNamespace(
        kv=torch.empty(1 + num_blocks, 1, 1, 16, 2),
        max_tokens=5000,
        max_drafts=max_drafts,
        num_device_drafts=max_drafts,
        batch=SimpleNamespace(spare_slot=num_slots),
        launch=plans.append,
        settle=lambda _: None,
    )
    _load_kernels(runner, longest_chunk)
    return plans


@pytest.mark.parametrize(("num_slots", "longest_chunk", "num_blocks"), [(64, 2048, 1000), (64, 64, 1000), (4, 2048, 2)])
def test_no_step_is_larger_than_a_request_s(num_slots: int, longest_chunk: int, num_blocks: int) -> None:
    longest = min(5000, 16 * num_blocks)
    for plan in plans_for(num_slots=num_slots, longest_chunk=longest_chunk, num_blocks=num_blocks):
        assert [row.slot for row in plan.rows] == [start.slot for start in plan.starts]
        assert len(plan.rows) <= num_slots
        assert len(plan.rows) == 1 or sum(row.num_query for row in plan.rows) <= longest_chunk
        assert all(row.num_query <= row.context_bound <= longest for row in plan.rows)
        assert all(max(start.block_ids) <= num_blocks for start in plan.starts)


def test_short_rows_alone_and_in_crowds_and_long_contexts() -> None:
    plans = plans_for(num_slots=64, longest_chunk=2048)
    shapes = {(len(plan.rows), plan.rows[0].num_query, plan.rows[0].context_bound) for plan in plans}
    assert {(64, length, length) for length in (2, 4, 8, 16)} <= shapes
    assert {(1, length, bound) for length in (1, 16, 128, 2048) for bound in (length, 5000)} <= shapes
    assert {(1, 1, 1 << i) for i in range(7, 13)} <= shapes
    drafted = [plan.rows[0] for plan in plans if plan.rows[0].num_drafts]
    assert [(row.num_query, row.num_drafts) for row in drafted] == [(2, 1), (3, 2), (4, 3)]
