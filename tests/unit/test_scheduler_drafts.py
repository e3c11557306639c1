"""What the scheduler asks of the draft policy, and what it tells it."""

from dataclasses import replace
from typing import ClassVar

import pytest

from server.request import SpeculationOptions
from server.scheduler.draft_policy import Allowance, FixedPolicy
from server.scheduler.statistics import StepTime
from tests.fakes.core import make_core, make_request


class _ScriptedPolicy:
    """Allows what the script says, step by step, and keeps what it is told."""

    is_adaptive: ClassVar[bool] = False

    def __init__(self, script: list[Allowance]) -> None:
        self.script = script
        self.rows: list[tuple[int, int]] = []
        self.steps: list[tuple[Allowance, int, float]] = []

    def allow(self, num_rows: int, num_new: int = 0) -> Allowance:
        assert num_rows >= 0
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def settle_row(self, allowance: Allowance, allowed: int, num_accepted: int) -> None:
        assert num_accepted <= allowed <= max(allowance.max_drafts, allowance.probed_drafts)
        self.rows.append((allowed, num_accepted))

    def settle_step(self, allowance: Allowance, num_rows: int, duration_s: float) -> None:
        self.steps.append((allowance, num_rows, duration_s))


def test_no_row_verifies_more_than_the_policy_allows() -> None:
    probe = Allowance(1, 1, probed_drafts=3, num_probed=1, first_probed=1)
    script = [Allowance(4, 4), Allowance(2, 4), Allowance(0, 0), Allowance(4, 3), probe, Allowance(2, 2)]
    # The prompts; two of four drafts; none, and none proposed; so none where four are allowed; a probe; one of two.
    most = [(0, 0), (2, 2), (0, 0), (0, 0), (1, 3), (1, 1)]
    policy = _ScriptedPolicy(list(script))
    core = make_core(max_drafts=4, num_blocks=64, draft_policy=policy)
    for name in ("a", "b"):
        core.scheduler.add(make_request(name, range(4), max_tokens=40))
    num_planned = 0
    for allowance, limits in zip(script, most, strict=True):
        plan = core.step()
        assert plan is not None
        assert plan.num_proposed == allowance.next_drafts
        num_planned += sum(row.num_drafts for row in plan.rows)
        assert all(row.num_drafts <= limit for row, limit in zip(plan.rows, limits, strict=True))
    assert num_planned > 0
    assert [allowed for allowed, _ in policy.rows] == [2, 2, 1, 3, 1, 1]


@pytest.mark.parametrize(("num_waiting", "num_new"), [(2, 2), (9, 4)])
def test_the_policy_is_told_how_many_sequences_are_new(num_waiting: int, num_new: int) -> None:
    asked: list[tuple[int, int]] = []

    class Asked(FixedPolicy):
        def allow(self, num_rows: int, num_new: int = 0) -> Allowance:
            asked.append((num_rows, num_new))
            return super().allow(num_rows, num_new)

    core = make_core(max_drafts=2, num_blocks=64, max_num_seqs=4, draft_policy=Asked(2))
    for index in range(num_waiting):
        core.scheduler.add(make_request(str(index), range(4), max_tokens=4))
    core.step()
    assert asked == [(0, num_new)]


def test_the_policy_learns_how_long_steps_of_decoding_rows_take() -> None:
    policy = _ScriptedPolicy([Allowance(2, 2)])
    core = make_core(max_drafts=2, num_blocks=64, draft_policy=policy)
    core.scheduler.add(make_request("a", range(4), max_tokens=40))
    for duration_s in (3.0, 0.25, 0.5):
        plan = core.scheduler.schedule()
        assert plan is not None
        core.clock.now_s += duration_s
        core.scheduler.update(core.executor.settle(core.executor.launch(plan)))
    assert policy.steps == [(Allowance(2, 2), 1, duration_s) for duration_s in (0.25, 0.5)]


def test_time_is_that_of_proposing_and_of_verifying() -> None:
    policy = _ScriptedPolicy([Allowance(0, 2), Allowance(2, 2), Allowance(2, 0), Allowance(0, 0)])
    core = make_core(max_drafts=2, num_blocks=64, draft_policy=policy, accuracy=1.0)
    core.scheduler.add(make_request("a", range(4), max_tokens=40))
    times = []
    for draft_s in (0.25, 0.5, 0.0, 0.0):
        plan = core.scheduler.schedule()
        assert plan is not None
        result = core.executor.settle(core.executor.launch(plan))
        core.clock.now_s += 2.0
        times.append(core.scheduler.update(replace(result, draft_s=draft_s)))
    drafted = [output.num_drafted > 0 for output in core.scheduler.take_outputs()]
    assert times == [
        StepTime(spent, 2.0 - spent if is_verifying else 0.0)
        for spent, is_verifying in zip((0.25, 0.5, 0.0, 0.0), drafted, strict=True)
    ]
    statistics = core.scheduler.statistics()
    assert (statistics.draft_seconds, statistics.num_draft_steps) == (0.75, 2)
    assert statistics.verify_seconds == sum(verify_s for _, verify_s in times) > 0
    assert statistics.num_verify_steps == sum(drafted) < 4
    assert statistics.steps_per_draft_limit == (1, 0, 2), "the prompt's step could not have had drafts"


def test_proposing_takes_no_longer_than_the_step() -> None:
    core = make_core(max_drafts=2)
    core.scheduler.add(make_request("a", range(4), max_tokens=4))
    plan = core.scheduler.schedule()
    assert plan is not None
    result = core.executor.settle(core.executor.launch(plan))
    core.clock.now_s += 1.0
    assert core.scheduler.update(replace(result, draft_s=1.5)).draft_s == 1.0


def test_a_request_without_speculation_teaches_nothing() -> None:
    policy = _ScriptedPolicy([Allowance(2, 2)])
    core = make_core(max_drafts=2, draft_policy=policy)
    core.scheduler.add(
        replace(make_request("a", range(4), max_tokens=6), speculation=SpeculationOptions(enabled=False))
    )
    core.run()
    assert policy.rows == []
