"""All drafts or none: where steps are replayed as they were captured, one draft takes as long as all of them do.

A step with drafts takes as long as so many without, its price. Drafts pay while a row gets more tokens than that.
While they are off, looking whether they would pay by now costs time. It is a debt, in steps without drafts, that each
step pays off a little of; the next look is taken once it is paid. So looking takes a given share of the time, whatever
the proposer and the batch.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from server.scheduler.draft_policy import Allowance
from server.scheduler.measurements import TRIES, Duration, Mean, row_class

LOOKING_SHARE = 0.01
"""Of all time, for looks."""
MOST_DEBT = 3.5
"""Steps lost with drafts that are held against the next look, which so is at most 350 steps away."""
NEW_SIZE_DEBT = 3.4
"""The same for a size of batch whose steps with drafts were never measured."""
COLD_STEPS = 16
"""Steps with drafts, while nothing is known, until one is measured; prompts that come one by one delay that."""
ROWS_REMEMBERED = 48
STEPS_REMEMBERED = 4
"""Accepted drafts are the mean of so many rows, or of the rows of so many steps if these are more."""
ROWS_BEFORE_LOOK = 4
"""Rows that all before a look count as, when it is judged whether drafts have become better."""
HOPEFUL_ROWS = 2
"""Rows that are thought to have brought twice what drafts cost, before any had."""
MARGIN = 1.03
"""So much more than their price drafts have to bring to be turned on; what they have missed is caught up with first."""
PRICE_AGE = 256
YOUNG_PRICE_AGE = 16
"""Steps with drafts after which those without are measured again, and for the first time."""


@dataclass(slots=True)
class _Size:
    """Steps with about the same number of rows.

    Attributes:
        off, on: their duration without drafts and with them. age: steps with drafts since `off` was measured.
    """

    off: Duration = field(default_factory=Duration)
    on: Duration = field(default_factory=Duration)
    age: int = PRICE_AGE - YOUNG_PRICE_AGE

    @property
    def price(self) -> float | None:
        """A step with drafts in steps without; None if one of them is not known."""
        if not (self.off.is_known and self.on.is_known):
            return None
        return max(1.0, self.on.seconds / self.off.seconds)


class OnOffPolicy:
    """Verifies as many drafts as can be proposed while they pay, and proposes none while they do not.

    It begins with drafts: those of the first answers follow from their prompts, later ones have to catch up.
    """

    is_adaptive: ClassVar[bool] = True

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._sizes: dict[int, _Size] = {}
        self._accepted = Mean(0.0)  # of a row that may have drafts
        self._drafting = Mean(1.0)  # share of rows that may
        self._memory = ROWS_REMEMBERED
        self._is_on = True
        self._was_on = False
        self._planned: list[bool] = []  # for the steps to come, the last one first
        self._num_cold = COLD_STEPS
        self._is_priced = False
        self._debt = 0.0
        self._looks: list[Allowance] = []  # of the last look's steps
        self._num_looking = 0  # steps of it that are to come
        self._settling: Allowance | None = None
        self._num_drafting = self._num_accepted = 0  # rows and drafts of the step that settles

    def allow(self, num_rows: int) -> Allowance:
        """All that were proposed; as many for the next step, or none."""
        self._memory = max(ROWS_REMEMBERED, STEPS_REMEMBERED * num_rows)
        size = self._of(num_rows)
        self._was_on = self._is_on
        if not self._planned:
            self._planned = self._decide(size, num_rows)
        self._is_on = self._planned.pop()
        verified, proposed = (self._max_drafts if is_on else 0 for is_on in (self._was_on, self._is_on))
        allowance = Allowance(verified, proposed, is_steady=verified == proposed)
        if self._num_looking:
            self._num_looking -= 1
            self._looks.append(allowance)
        return allowance

    def settle_row(self, allowance: Allowance, allowed: int, num_accepted: int) -> None:
        """Take in how many drafts a row kept."""
        self._begin(allowance)
        self._num_drafting += 1
        self._num_accepted += num_accepted
        self._accepted.add(num_accepted, self._memory)

    def settle_step(self, allowance: Allowance, num_rows: int, duration_s: float) -> None:
        """Take in how long a step took, and what it brought for that."""
        self._begin(allowance)
        size = self._of(num_rows)
        if allowance.max_drafts:
            self._drafting.add(min(1.0, self._num_drafting / num_rows), ROWS_REMEMBERED)
        if allowance.is_steady and allowance.max_drafts:
            size.on.add(duration_s)
            size.age += 1
        elif allowance.is_steady:
            size.off.add(duration_s)
            size.age = 0
        lost = -LOOKING_SHARE
        if size.off.is_known and any(each is allowance for each in self._looks):
            lost += duration_s / size.off.seconds - 1.0 - self._num_accepted / num_rows
        self._debt = min(max(0.0, self._debt + lost), MOST_DEBT)

    def _begin(self, allowance: Allowance) -> None:
        """A step settles: its rows, then the step."""
        if allowance is not self._settling:
            self._settling = allowance
            self._num_drafting = self._num_accepted = 0

    def _decide(self, size: _Size, num_rows: int) -> list[bool]:
        """Whether to propose in the steps to come, the last one first.

        What a step brought is known two steps later: the one behind it is under way by then.
        """
        if self._num_cold:
            self._num_cold -= 1
            if not any(each.on.count for each in self._sizes.values()):
                return [True]
            self._num_cold = 0
            return [False] * (1 + TRIES + 1)
        price = self._price(num_rows)
        if price is not None and not self._is_priced:
            self._begin_priced(price)
        worth = 1.0 + self._accepted.value * self._drafting.value
        if price is not None and worth >= price * (1.0 if self._is_on else MARGIN):
            if size.age < PRICE_AGE:
                return [True]
            size.age = PRICE_AGE - YOUNG_PRICE_AGE
            return [False] * (1 + TRIES)
        may_pay = price is None or 2.0 * (worth - 1.0) > price - 1.0
        limit = NEW_SIZE_DEBT if may_pay and not size.on.is_known else 0.0
        if self._is_on or not size.off.is_known or self._debt > limit:
            return [False]
        num_steps = 2
        if size.on.is_known:
            self._accepted.count = min(self._accepted.count, ROWS_BEFORE_LOOK)
        else:  # it is their price that is looked for
            num_steps = 1 + TRIES
        self._looks, self._num_looking = [], num_steps + 1  # the last one verifies what was proposed
        return [False, False] + [True] * num_steps

    def _begin_priced(self, price: float) -> None:
        """What drafts cost is known for the first time, and so what it has cost to find that out.

        A few rows of a single sequence may be unlucky: drafts are thought to pay until some more say otherwise.
        """
        self._is_priced = True
        self._debt = min(TRIES * (price - 1.0), MOST_DEBT)
        for _ in range(HOPEFUL_ROWS):
            self._accepted.add(2.0 * (price - 1.0), self._memory)

    def _of(self, num_rows: int) -> _Size:
        return self._sizes.setdefault(row_class(num_rows), _Size())

    def _price(self, num_rows: int) -> float | None:
        """Of steps with so many rows; if that is not known, of those with the next number that it is known of."""
        known = {rows: size.price for rows, size in self._sizes.items() if size.price is not None}
        if not known:
            return None
        return known[min(known, key=lambda rows: abs(math.log(rows / num_rows)))]
