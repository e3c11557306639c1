"""What is told of speculation in the end."""

import pytest

from server.engine.protocol import SpeculationStats
from server.engine.speculation_log import SpeculationLog
from server.request import SpeculationOptions
from server.scheduler.statistics import StepTime

STEPS = ((4, 2), (4, 4), (1, 0), (3, 2))


def stats(**options: object) -> SpeculationStats:
    log = SpeculationLog(SpeculationOptions(**{"num_speculative_tokens": 4, **options}))  # type: ignore[arg-type]
    for num_drafted, num_accepted in STEPS:
        log.add(num_drafted, num_accepted, StepTime(0.25, 1.0))
    log.add(0, 0, StepTime(0.5, 2.0))  # of others
    return log.stats()


def test_a_summary_adds_up() -> None:
    found = stats()
    assert (found.num_spec_steps, found.num_draft_tokens, found.num_accepted_draft_tokens) == (4, 12, 8)
    assert found.mean_acceptance_length == pytest.approx(1 + 8 / 4)
    assert found.draft_acceptance_rate == pytest.approx(8 / 12)
    assert found.acceptance_histogram == (1, 0, 2, 0, 1)
    assert found.num_speculative_tokens == 4
    assert (found.draft_s, found.verify_s) == (4 * 0.25 + 0.5, 4 * 1.0), "what it waited for, and what was for it"
    assert (found.proposed_per_step, found.accepted_per_step, found.is_synthetic) == ((), (), False)


def test_details_are_those_of_each_step() -> None:
    found = stats(metrics="detailed")
    assert tuple(zip(found.proposed_per_step, found.accepted_per_step, strict=True)) == STEPS
    assert stats(metrics="summary").proposed_per_step == ()


def test_a_choice_without_such_steps() -> None:
    found = SpeculationLog(SpeculationOptions(num_speculative_tokens=2, is_synthetic=True)).stats()
    assert (found.acceptance_histogram, found.mean_acceptance_length, found.draft_acceptance_rate) == ((0, 0, 0), 0, 0)
    assert not found.is_synthetic, "what was not drafted for is the model's own"
    off = SpeculationLog(SpeculationOptions(enabled=False, num_speculative_tokens=2)).stats()
    assert off == SpeculationStats()


def test_what_is_synthetic_says_so() -> None:
    assert stats(is_synthetic=True).is_synthetic
