"""All drafts or none: where steps are replayed as they were captured, one draft takes as long as all of them do.

A step with drafts takes as long as so many without, its price. Drafts pay while a row gets more tokens than that.
While they are off, looking whether they would pay by now costs time, most of all that of catching up with what was
missed, for all rows at once. The next look is taken when a small share of the time since the last one pays for it. So
looking takes a given share of the time, whatever the proposer and the batch.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from server.scheduler.draft_policy import Allowance
from server.scheduler.measurements import TRIES, Mean, Typical, row_class

LOOKING_SHARE = 0.01
"""Of all time, for looks."""
LEAST_LOOK, MOST_LOOK = 0.1, 30.0
"""What a look is thought to cost, in steps without drafts: the next one is 10 to 3,000 steps away."""
HOPEFUL_LOOK = 0.5
"""The same if drafts have brought half of what they cost, but few rows had any."""
LOOK_BASE, LOOK_PER_ROW = 2.5, 0.25
"""The first look's cost, if the proposer has to catch up; 64 rows at once are not a captured step any more."""
COLD_STEPS = 16
"""Steps with drafts, while nothing is known, until one is measured; prompts that come one by one delay that."""
ROWS_REMEMBERED = 48
STEPS_REMEMBERED = 4
"""Accepted drafts are the mean of so many rows, or of the rows of so many steps if these are more."""
ROWS_BEFORE_LOOK = 2
"""Rows that all before a look count as, when it is judged whether drafts have become better."""
HOPEFUL_ROWS = 2
"""Rows that are thought to have brought twice what drafts cost, before any had."""
LEAST_PRICE = 1.05
"""Drafts are never thought to cost less: a pause while those without were measured would make them seem free."""
MARGIN = 1.05
"""So much more than their price drafts have to bring to be turned on after a look."""
SURE_MARGIN = 1.3
"""The same without one, as when there are other rows than those they did not pay for."""
PRICE_AGE = 256
YOUNG_PRICE_AGE = 16
"""Least steps with drafts after which those without are measured again, and for the first time if they never were."""


@dataclass(slots=True)
class _Size:
    """Steps with about the same number of rows.

    Attributes:
        look_cost: what a look costs, in steps without drafts. num_steps: since the last one.
        off, on: their duration without drafts and with them. age: steps with drafts since `off` was measured.
        old: age at which it is measured again; the first one comes soon.
    """

    look_cost: float
    num_steps: int = 0
    off: Typical = field(default_factory=Typical)
    on: Typical = field(default_factory=Typical)
    age: int = field(init=False)
    old: int = field(init=False)

    def __post_init__(self) -> None:
        self.know_look(self.look_cost)
        self.age = self.old - YOUNG_PRICE_AGE

    def know_look(self, cost: float) -> None:
        """So much was lost by a look; measuring `off` again costs about as much."""
        self.look_cost = min(max(LEAST_LOOK, cost), MOST_LOOK)
        self.old = max(PRICE_AGE, round(self.look_cost / LOOKING_SHARE))

    @property
    def price(self) -> float | None:
        """A step with drafts in steps without; None if one of them is not known."""
        if not (self.off.is_known and self.on.is_known):
            return None
        return max(LEAST_PRICE, self.on.seconds / self.off.seconds)


class OnOffPolicy:
    """Verifies as many drafts as can be proposed while they pay, and proposes none while they do not.

    It begins with drafts: those of the first answers follow from their prompts, later ones have to catch up.
    """

    is_adaptive: ClassVar[bool] = True

    def __init__(self, max_drafts: int, *, catches_up: bool = True) -> None:
        """Args: catches_up: whether the proposer has to do what was computed while it was off."""
        self._max_drafts = max_drafts
        self._catches_up = catches_up
        self._sizes: dict[int, _Size] = {}
        self._accepted = Mean(0.0)  # of a row that may have drafts
        self._drafting = Mean(1.0)  # share of rows that may
        self._memory = ROWS_REMEMBERED
        self._allowance = Allowance(0, max_drafts)  # of the last step
        self._planned: list[bool] = []  # whether to propose in the steps to come, the last one first
        self._num_cold = COLD_STEPS
        self._is_priced = False
        self._is_used = False  # drafts pay
        self._has_looked = True  # whether they do is to be judged
        self._look: list[Allowance] = []  # the last look's steps, and the one that was under way
        self._num_looking = 0  # steps of it that are to come
        self._cost = 0.0  # of those that have settled
        self._settling: Allowance | None = None
        self._num_drafting = self._num_accepted = 0  # rows and drafts of the step that settles

    def allow(self, num_rows: int) -> Allowance:
        """All that were proposed; as many for the next step, or none."""
        self._memory = max(ROWS_REMEMBERED, STEPS_REMEMBERED * num_rows)
        if not self._planned:
            self._planned = self._decide(self._of(num_rows), num_rows)
        verified, proposed = self._allowance.next_drafts, self._max_drafts * self._planned.pop()
        self._allowance = Allowance(verified, proposed, is_steady=verified == proposed)
        if self._num_looking:
            self._num_looking -= 1
            self._look.append(self._allowance)
        return self._allowance

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
        size.num_steps += 1
        if allowance.max_drafts:
            self._drafting.add(min(1.0, self._num_drafting / num_rows), ROWS_REMEMBERED)
        if allowance.is_steady and allowance.max_drafts:
            size.on.add(duration_s)
            size.age += 1
        elif allowance.is_steady:
            size.off.add(duration_s)
            size.age = 0
        if size.off.is_known and any(each is allowance for each in self._look):
            self._settle_look(size, duration_s / size.off.seconds, self._num_accepted / num_rows)
            if allowance is self._look[-1] and not self._num_looking:
                size.know_look(self._cost)

    def _begin(self, allowance: Allowance) -> None:
        """A step settles: its rows, then the step."""
        if allowance is not self._settling:
            self._settling = allowance
            self._num_drafting = self._num_accepted = 0

    def _settle_look(self, size: _Size, duration: float, num_accepted: float) -> None:
        """A step of a look took so many steps without drafts, and a row kept so many drafts: what is lost by that."""
        usual = self._worth / size.price if self._is_used and size.price is not None else 1.0
        self._cost += duration - (1.0 + num_accepted) / max(1.0, usual)

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
            self._begin_priced(size, price)
        if price is not None and self._pays(price):
            if size.age < size.old:
                return [True]
            self._begin_look(size, 1 + TRIES + 1)  # the last one has to catch up
            return [False] * (1 + TRIES)
        may_pay = price is None or 2.0 * (self._worth - 1.0) > price - 1.0
        cost = LEAST_LOOK if may_pay and not size.on.is_known else size.look_cost
        if self._allowance.next_drafts or not size.off.is_known or size.num_steps * LOOKING_SHARE < cost:
            return [False]
        num_steps = 2
        if size.on.is_known:
            self._accepted.count = min(self._accepted.count, ROWS_BEFORE_LOOK)
        else:  # it is their price that is looked for
            num_steps = 1 + TRIES
        self._has_looked = True
        self._begin_look(size, num_steps + 1)  # the last one verifies what was proposed
        return [False, False] + [True] * num_steps

    def _pays(self, price: float) -> bool:
        """Whether to use drafts; once they are not used, only a look changes that, or a price that is much lower."""
        margin = 1.0 if self._is_used else MARGIN if self._has_looked else SURE_MARGIN
        self._has_looked = False
        self._is_used = self._worth > price * margin
        return self._is_used

    def _begin_look(self, size: _Size, num_steps: int) -> None:
        """Count its cost, with the step that is under way: launching the next one may hold that one up."""
        self._look, self._num_looking, self._cost = [self._allowance], num_steps, 0.0
        size.num_steps = 0

    def _begin_priced(self, size: _Size, price: float) -> None:
        """What drafts cost is known for the first time.

        A few rows of a single sequence may be unlucky: drafts are thought to pay until some more say otherwise.
        """
        self._is_priced = True
        if self._accepted.count < ROWS_REMEMBERED and 2.0 * (self._worth - 1.0) > price - 1.0:
            size.look_cost = HOPEFUL_LOOK
        for _ in range(HOPEFUL_ROWS):
            self._accepted.add(2.0 * (price - 1.0), self._memory)

    @property
    def _worth(self) -> float:
        """Tokens that a row gets of a step with drafts."""
        return 1.0 + self._accepted.value * self._drafting.value

    def _of(self, num_rows: int) -> _Size:
        rows = row_class(num_rows)
        if rows not in self._sizes:
            self._sizes[rows] = _Size(LOOK_BASE + LOOK_PER_ROW * rows if self._catches_up else HOPEFUL_LOOK)
        return self._sizes[rows]

    def _price(self, num_rows: int) -> float | None:
        """Of steps with so many rows; if that is not known, of those with the next number that it is known of."""
        known = {rows: size.price for rows, size in self._sizes.items() if size.price is not None}
        if not known:
            return None
        return known[min(known, key=lambda rows: abs(math.log(rows / num_rows)))]
