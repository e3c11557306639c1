"""When it is said that drafts do not pay, what is said to be changed, and how often."""

import logging

import pytest

from server.scheduler.auto_policy import AutoPolicy
from server.scheduler.draft_policy import DraftPolicy, FixedPolicy
from server.scheduler.speculation_watch import QUIET_WINDOWS, WINDOW, SpeculationWatch
from server.scheduler.statistics import Counters, StepTime


class Watched:
    """A watch with the counters it reads."""

    def __init__(self, *, is_adaptive: bool = True) -> None:
        self.counters = Counters()
        self.watch = SpeculationWatch(self.counters)
        self.policy: DraftPolicy = AutoPolicy(5) if is_adaptive else FixedPolicy(5)

    def window(self, num_drafted: int, num_accepted: int, *, draft_s: float = 0.0, steps: int = WINDOW) -> None:
        """Steps of a second, each with one row of so many drafts."""
        for _ in range(steps):
            if num_drafted:
                self.counters.count_drafts(num_drafted, num_accepted)
            self.watch.settle_step(
                1.0, StepTime(draft_s, 1.0 - draft_s), is_verifying=num_drafted > 0, policy=self.policy
            )

    def advice(self) -> dict[str, str]:
        return dict(self.watch.advice)


def test_few_accepted_drafts_are_noticed_after_a_window_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.window(5, 0, steps=WINDOW - 1)
    assert watched.advice() == {}
    watched.window(5, 0, steps=1)
    assert watched.advice() == {"low_acceptance": "change_method"}
    for _ in range(3):
        watched.window(5, 0)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "speculation: 0% of the drafts of 256 steps were accepted, less than 30%: take another method, or none; the "
        "policy auto verifies fewer of them, or none, while that is faster"
    )


def test_where_the_first_drafts_are_right_fewer_are_better(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.window(5, 1)
    assert watched.advice() == {"low_acceptance": "lower_num_speculative_tokens"}
    assert "lower num_speculative_tokens to 3;" in caplog.text, "one of three is a third"


def test_acceptance_is_that_of_the_window_alone() -> None:
    watched = Watched()
    watched.window(2, 2)
    watched.window(2, 0)
    assert watched.advice() == {"low_acceptance": "change_method"}, "half of all drafts so far were accepted"
    watched.window(2, 2)
    assert watched.advice() == {}


@pytest.mark.parametrize(("draft_s", "is_slow"), [(0.25, False), (0.26, True)])
def test_proposing_may_take_a_quarter_of_the_time(
    draft_s: float, is_slow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched()
    watched.window(2, 2, draft_s=draft_s)
    assert watched.advice() == ({"slow_drafts": "lower_num_speculative_tokens"} if is_slow else {})
    assert ("proposing drafts took 26% of the time of 256 steps, more than 25%: lower" in caplog.text) == is_slow


def test_one_draft_that_is_slow_can_not_be_less() -> None:
    watched = Watched()
    watched.window(1, 1, draft_s=0.5)
    assert watched.advice() == {"slow_drafts": "change_method"}


def test_a_fixed_number_is_told_of_the_policy(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(is_adaptive=False)
    watched.window(5, 0, draft_s=0.5)
    assert watched.advice() == {"low_acceptance": "set_policy_auto", "slow_drafts": "set_policy_auto"}
    assert caplog.text.count('or set "policy": "auto", which verifies as many as pay') == 2


def test_steps_without_drafts_are_no_evidence() -> None:
    watched = Watched()
    watched.window(0, 0, steps=3 * WINDOW)
    assert watched.advice() == {}
    watched.window(5, 0, steps=WINDOW - 1)
    watched.window(0, 0)
    assert watched.advice() == {}


def test_what_comes_and_goes_is_said_seldom(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for _ in range(QUIET_WINDOWS):
        watched.window(1, 0)
        watched.window(1, 1)
    assert len(caplog.records) == 2


def test_another_policy_begins_anew() -> None:
    watched = Watched()
    watched.window(5, 0)
    watched.window(5, 0, steps=WINDOW - 1)
    watched.policy = FixedPolicy(5)
    watched.window(5, 0, steps=1)
    assert watched.advice() == {}
