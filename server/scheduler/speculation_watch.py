"""Notices that drafts do not pay, and says what to change: once in the log, and in the statistics while it lasts."""

import enum
import logging
from collections.abc import Mapping, Sequence

from server.scheduler.draft_policy import DraftPolicy
from server.scheduler.statistics import Counters, StepTime

logger = logging.getLogger(__name__)

WINDOW = 256
"""Steps that verified drafts, or proposed some, after which they are judged."""
LEAST_ACCEPTANCE = 0.3
MOST_DRAFT_SHARE = 0.25
"""Of the drafts that were verified, and of the time of the steps that proposed."""
QUIET_WINDOWS = 32
"""Windows for which what was said is not said again, should it have ended and begun anew."""

_AUTO = "; the policy auto verifies fewer of them, or none, while that is faster"
_NOT_AUTO = ', or set "policy": "auto", which verifies as many as pay'


class Problem(enum.Enum):
    """What may be wrong; the value is the word that statistics use."""

    LOW_ACCEPTANCE = "low_acceptance"
    SLOW_DRAFTS = "slow_drafts"


class Change(enum.Enum):
    """What to change; the value is the word that statistics use."""

    SET_POLICY_AUTO = "set_policy_auto"
    LOWER_NUM_SPECULATIVE_TOKENS = "lower_num_speculative_tokens"
    CHANGE_METHOD = "change_method"


class _Alarm:
    """Whether something is wrong, window by window."""

    def __init__(self) -> None:
        self.change: Change | None = None
        self._num_windows = QUIET_WINDOWS

    def judge(self, change: Change | None) -> bool:
        """Args: change: None if nothing is wrong. Returns: whether to log it."""
        begins = change is not None and self.change is None
        self.change = change
        self._num_windows += 1
        if begins and self._num_windows > QUIET_WINDOWS:
            self._num_windows = 0
            return True
        return False


class SpeculationWatch:
    """Owned by the scheduler, which tells it of each settled step."""

    def __init__(self, counters: Counters) -> None:
        """Args: counters: the scheduler's, which are read only."""
        self._counters = counters
        self._acceptance, self._draft_time = _Alarm(), _Alarm()
        self._policy: DraftPolicy | None = None
        self._begin_acceptance()
        self._begin_draft_time()

    @property
    def advice(self) -> Mapping[str, str]:
        """What to change, by what is wrong; empty while nothing is."""
        alarms = ((Problem.LOW_ACCEPTANCE, self._acceptance), (Problem.SLOW_DRAFTS, self._draft_time))
        return {problem.value: alarm.change.value for problem, alarm in alarms if alarm.change is not None}

    def settle_step(self, duration_s: float, step_time: StepTime, *, is_verifying: bool, policy: DraftPolicy) -> None:
        """A step has settled and was counted.

        Args:
            duration_s: of the whole step.
            policy: what decides; with another one everything begins anew.
        """
        if policy is not self._policy:
            self._policy = policy
            self._acceptance.change = self._draft_time.change = None
            self._begin_acceptance()
            self._begin_draft_time()
        if is_verifying:
            self._num_verifying += 1
            if self._num_verifying == WINDOW:
                self._judge_acceptance(is_adaptive=policy.is_adaptive)
                self._begin_acceptance()
        if step_time.draft_s > 0:
            self._num_proposing += 1
            self._draft_s += step_time.draft_s
            self._duration_s += duration_s
            if self._num_proposing == WINDOW:
                self._judge_draft_time(is_adaptive=policy.is_adaptive)
                self._begin_draft_time()

    def _begin_acceptance(self) -> None:
        self._num_verifying = 0
        self._drafted_before, self._accepted_before = self._counters.drafted, self._counters.accepted

    def _begin_draft_time(self) -> None:
        self._num_proposing = 0
        self._draft_s = self._duration_s = 0.0

    def _judge_acceptance(self, *, is_adaptive: bool) -> None:
        drafted = _difference(self._counters.drafted, self._drafted_before)
        accepted = _difference(self._counters.accepted, self._accepted_before)
        rate = sum(accepted) / sum(drafted) if sum(drafted) else 1.0  # of sequences that have ended since
        most = _most_drafts(drafted, accepted)
        change = None if rate >= LEAST_ACCEPTANCE else _change(is_adaptive=is_adaptive, can_lower=most > 0)
        if self._acceptance.judge(change):
            logger.warning(
                "speculation: %.0f%% of the drafts of %d steps were accepted, less than %.0f%%: %s%s",
                100 * rate,
                WINDOW,
                100 * LEAST_ACCEPTANCE,
                f"lower num_speculative_tokens to {most}" if most else "take another method, or none",
                _AUTO if is_adaptive else _NOT_AUTO,
            )

    def _judge_draft_time(self, *, is_adaptive: bool) -> None:
        share = self._draft_s / self._duration_s if self._duration_s else 0.0
        can_lower = len(self._counters.drafted) > 1
        change = None if share <= MOST_DRAFT_SHARE else _change(is_adaptive=is_adaptive, can_lower=can_lower)
        if self._draft_time.judge(change):
            logger.warning(
                "speculation: proposing drafts took %.0f%% of the time of %d steps, more than %.0f%%: %s%s",
                100 * share,
                WINDOW,
                100 * MOST_DRAFT_SHARE,
                "lower num_speculative_tokens, or take a faster method" if can_lower else "take a faster method",
                _AUTO if is_adaptive else _NOT_AUTO,
            )


def _change(*, is_adaptive: bool, can_lower: bool) -> Change:
    """The least that helps."""
    if not is_adaptive:
        return Change.SET_POLICY_AUTO
    return Change.LOWER_NUM_SPECULATIVE_TOKENS if can_lower else Change.CHANGE_METHOD


def _difference(after: Sequence[int], before: Sequence[int]) -> list[int]:
    """By position; there may be more of them by now."""
    return [count - (before[i] if i < len(before) else 0) for i, count in enumerate(after)]


def _most_drafts(drafted: Sequence[int], accepted: Sequence[int]) -> int:
    """So many drafts a row would have been accepted often enough; 0 if not even one."""
    fitting = (k for k in range(len(drafted), 0, -1) if sum(accepted[:k]) >= LEAST_ACCEPTANCE * sum(drafted[:k]) > 0)
    return next(fitting, 0)
