"""Asks the draft policy for each step, and tells it what came of the step."""

from collections import deque
from typing import NamedTuple

from server.scheduler.draft_policy import Allowance, DraftPolicy
from server.scheduler.sequence import Sequence

NO_DRAFTS = Allowance(0, 0)


class _Step(NamedTuple):
    """A step that was launched and has not settled."""

    launched_s: float
    policy: DraftPolicy
    allowance: Allowance
    num_rows: int
    is_decoding: bool
    is_speculating: bool


class DraftControl:
    """Owned by the scheduler, which calls it for each step and row.

    Attributes:
        is_on: whether drafts are proposed and verified at all. A policy that is not asked goes on learning.
    """

    def __init__(self, policy: DraftPolicy) -> None:
        self._policy = policy
        self.is_on = True
        self._allowance = NO_DRAFTS
        self._is_launched = True
        self._num_rows = 0
        self._num_asked = 0
        self._num_proposed = 0
        self._steps: deque[_Step] = deque()
        self._last_settled_s = 0.0

    @property
    def policy(self) -> DraftPolicy:
        """What decides."""
        return self._policy

    def use(self, policy: DraftPolicy) -> None:
        """Decide by another policy from the next step on; steps under way settle with the one they were launched by."""
        self._policy = policy
        self._is_launched = True

    def begin(self, num_rows: int, num_new: int = 0) -> None:
        """A step is planned for about so many running sequences, or for new ones if there are none.

        A plan that comes to nothing, as all rows wait for a step to settle, leaves what the policy allowed to the next,
        unless they have ended by then.
        """
        self._num_rows = max(1, num_rows)
        self._num_asked = 0
        if not self.is_on:
            self._allowance = NO_DRAFTS
        elif self._is_launched or not num_rows:
            self._allowance = self._policy.allow(num_rows, num_new)
        self._is_launched = not self.is_on

    def allow(self, sequence: Sequence) -> int:
        """Most drafts of the next of these sequences: what the policy allows, of what was to be proposed for it."""
        index, self._num_asked = self._num_asked, self._num_asked + 1
        allowed = self._allowance.of_row(index, self._num_rows)
        return min(allowed, self._num_proposed, sequence.num_speculative_tokens)

    def launch(self, now_s: float, num_rows: int, *, is_decoding: bool, is_speculating: bool) -> int:
        """The step is launched.

        Args:
            is_decoding: whether all rows do.
            is_speculating: whether a row goes on with an answer that may be drafted for.
        Returns: how many drafts of a row are to be proposed for the one after it.
        """
        self._steps.append(_Step(now_s, self._policy, self._allowance, num_rows, is_decoding, is_speculating))
        self._is_launched = True
        self._num_proposed = self._allowance.next_drafts
        return self._num_proposed

    def settling(self, now_s: float) -> tuple[float, int | None]:
        """Of the oldest step, which settles now: its duration, and the most drafts of a row that is no probe.

        None in place of these where no row could have had any.
        """
        step = self._steps[0]
        draft_limit = step.allowance.max_drafts if step.is_speculating else None
        return now_s - max(step.launched_s, self._last_settled_s), draft_limit

    def settle_row(self, num_allowed: int, num_accepted: int) -> None:
        """A row of the oldest step has settled."""
        if num_allowed:
            step = self._steps[0]
            step.policy.settle_row(step.allowance, num_allowed, num_accepted)

    def settle_step(self, now_s: float, *, is_usual: bool) -> None:
        """The oldest step has settled, after its rows.

        Args: is_usual: whether it did no work of other steps. Of a probe that work is a part of the price.
        """
        duration_s, _ = self.settling(now_s)
        step = self._steps.popleft()
        self._last_settled_s = now_s
        if step.is_decoding and duration_s > 0 and (is_usual or not step.allowance.is_steady):
            step.policy.settle_step(step.allowance, step.num_rows, duration_s)
