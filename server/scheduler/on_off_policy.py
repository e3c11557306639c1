"""All drafts or none: where steps are replayed as they were captured, one draft takes as long as all of them do.

A step with drafts takes as long as so many without, its price; they pay while a row gets more tokens than that. What
they bring beyond it, or lack, goes to an account, in steps without drafts. They stay on until they have lost more than
bad luck explains. While off, only turning them on again, a look, tells whether they would pay by now. The account pays
for it; it gets a small share of all time and what drafts have won: those of no use are looked at seldom.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from server.scheduler.draft_policy import Allowance
from server.scheduler.measurements import TRIES, Duration, Mean, row_class

LOOKING_SHARE = 0.01
"""Of the time without drafts, for looks."""
SAVED = 2.0
"""Steps that may be lost at first, as many as it takes to find out that drafts do not pay."""
MOST_SAVED = 24.0
"""So much of what drafts have won is kept: two or three looks when a text has become worse."""
PACE, HOPEFUL_PACE = 0.03, 0.15
"""Of the time since drafts were turned off, for one look: what was won is not spent at once. The second if they have
brought half of their price: they are looked at after some 30 steps."""
LOOK_STEPS = 3
"""Steps with drafts until what the first one brought is known, and heeded."""
USELESS_ROWS = 3
"""Drafts of which the first rows, so many or more, kept none are turned off."""
BEARABLE_LOSS, LOSS_OF_ONE = 2.0, 8.0
"""Others when they have lost more since they paid last: the first, and the second, divided by the rows, as few rows
may be unlucky, and a text often becomes easier to draft for."""
START_BASE, START_PER_ROW = 1.5, 0.25
"""What turning drafts on is thought to cost where the proposer has to catch up, until it is measured."""
LEAST_START, MOST_START = 0.1, 30.0
"""Bounds of what is measured: drafts are never turned on for nothing, and the machine may have paused."""
MEMORY = 16
"""Steps with drafts after which what one brought counts for little."""
ASSUMED_PRICE = 2.0
"""Until one is known."""
LEAST_PRICE = 1.1
"""Drafts are never thought to cost less: a pause while those without were measured would make them seem free."""
PRICE_AGE, NEW_AGE, FIRST_AGE = 256, 24, 2
"""Steps with drafts after which those without are measured again, for the first time with about so many rows, and for
the first time of all."""
FAR = 16.0
"""The price of steps with so many times as many rows tells nothing of others."""
SURE = 1.3
"""Drafts that bring so much more than their price, or less, are turned on or off at once where there are suddenly more
rows, or fewer; and while they do, an old price is as good as a new one."""
MOST_UNSEEN = 16
"""Steps since drafts were turned on of which none could be measured, as prompts were computed with all: they are
turned off again."""


@dataclass(slots=True)
class _Size:
    """Steps with about the same number of rows.

    Attributes:
        start_cost: what turning drafts on costs, in steps without; above all what the proposer has to catch up with.
        off, on: the duration of a step without drafts and with them. age: steps with drafts since `off` was measured.
    """

    start_cost: float
    off: Duration = field(default_factory=Duration)
    on: Duration = field(default_factory=Duration)
    age: int = 0

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
        self._last_size: _Size | None = None  # of the last step, unless it was a look at new sequences
        self._allowance = Allowance(0, max_drafts)  # of the last step
        self._is_on = True
        self._num_measuring = 0  # steps without drafts to come, though they are on
        self._worth = Mean(ASSUMED_PRICE)  # tokens that a row gets of a step with drafts
        self._saved = SAVED
        self._lost = 0.0  # since drafts paid last
        self._num_seen = self._num_kept = 0  # rows, and drafts that they kept, since drafts were turned on
        self._num_unseen = 0  # steps since then, until the first was measured
        self._num_off = 0  # steps since they were turned off
        self._before_start: Allowance | None = None  # the step that was under way when they were turned on
        self._start_cost = 0.0
        self._settling: Allowance | None = None
        self._num_accepted = 0  # by the rows of the step that settles

    def allow(self, num_rows: int, num_new: int = 0) -> Allowance:
        """All that were proposed; as many for the next step, or none."""
        proposes = self._decide(num_rows) if num_rows else self._decide_afresh(max(1, num_new))
        verified, proposed = self._allowance.next_drafts, self._max_drafts * proposes
        if proposed > verified:
            self._before_start, self._start_cost = self._allowance, 0.0
        self._allowance = Allowance(verified, proposed, is_steady=verified == proposed)
        return self._allowance

    def settle_row(self, allowance: Allowance, allowed: int, num_accepted: int) -> None:
        """Take in how many drafts a row kept."""
        if allowance is not self._settling:
            self._settling, self._num_accepted = allowance, 0
        self._num_accepted += num_accepted

    def settle_step(self, allowance: Allowance, num_rows: int, duration_s: float) -> None:
        """Take in how long a step took, and what it brought for that."""
        size = self._of(num_rows)
        if allowance.is_steady:
            self._measure(size, duration_s, with_drafts=allowance.max_drafts > 0)
        if allowance.max_drafts:
            num_kept = self._num_accepted if allowance is self._settling else 0
            price = self._price(num_rows) or ASSUMED_PRICE
            self._settle_drafts(num_kept, num_rows, price if allowance.is_steady else 1.0)
        elif allowance.next_drafts or allowance is self._before_start:
            if size.off.is_known:
                self._start_cost += duration_s / size.off.seconds - 1.0
                size.start_cost = min(max(LEAST_START, self._start_cost), MOST_START)
            if allowance.next_drafts:
                self._saved -= size.start_cost
        else:
            self._num_off += 1
            self._saved = min(self._saved + LOOKING_SHARE, MOST_SAVED)

    def _measure(self, size: _Size, duration_s: float, *, with_drafts: bool) -> None:
        if with_drafts:
            size.on.add(duration_s)
            size.age += 1
            return
        if size.age >= PRICE_AGE:
            size.off = Duration()
        size.off.add(duration_s)
        size.age = 0

    def _settle_drafts(self, num_kept: int, num_rows: int, cost: float) -> None:
        """The rows of a step that took as long as so many without kept so many drafts."""
        self._num_seen += num_rows
        self._num_kept += num_kept
        tokens = 1.0 + num_kept / num_rows
        self._worth.add(tokens, MEMORY)
        self._saved = min(self._saved + tokens - cost, MOST_SAVED)
        self._lost = max(0.0, self._lost - (tokens - cost))

    def _decide_afresh(self, num_rows: int) -> bool:
        """Whether to propose for so many sequences that are all new: a look at them costs no start."""
        self._num_measuring = 0
        self._lost = 0.0
        if not self._is_on and self._may_look(self._price(num_rows) or ASSUMED_PRICE, 0.0):
            self._last_size = None
            self._turn_on()
        return self._is_on

    def _decide(self, num_rows: int) -> bool:
        """Whether to propose for so many rows."""
        if self._num_measuring:
            self._num_measuring -= 1
            return False
        size, known_price = self._of(num_rows), self._price(num_rows)
        price = known_price or ASSUMED_PRICE
        if self._last_size is not None and size is not self._last_size:
            self._lost = 0.0
            if not self._is_on and self._worth.value > SURE * price:
                self._turn_on()
            elif self._is_on and SURE * self._worth.value < price:
                self._turn_off()
        self._last_size = size
        if not self._is_on:
            if self._may_look(price, size.start_cost):
                self._turn_on()
            return self._is_on
        self._num_unseen += not self._num_seen
        is_useless = self._num_seen >= USELESS_ROWS and not self._num_kept
        if is_useless or self._lost > BEARABLE_LOSS + LOSS_OF_ONE / num_rows or self._num_unseen > MOST_UNSEEN:
            self._turn_off()
        elif self._is_to_measure(size, known_price):
            self._num_measuring = TRIES + 1
            return False
        return self._is_on

    def _is_to_measure(self, size: _Size, price: float | None) -> bool:
        """Whether steps without drafts are measured, if that may matter; it costs a start, too."""
        if not size.off.is_known:
            return size.age >= (NEW_AGE if price else FIRST_AGE)
        return size.age >= PRICE_AGE and price is not None and self._worth.value < SURE * price

    def _may_look(self, price: float, start_cost: float) -> bool:
        """Whether a look is paid for that finds drafts useless."""
        cost = start_cost + LOOK_STEPS * (price - 1.0)
        is_hopeful = 2.0 * (self._worth.value - 1.0) > price - 1.0
        return min(self._saved, self._num_off * (HOPEFUL_PACE if is_hopeful else PACE)) >= min(cost, MOST_SAVED)

    def _turn_on(self) -> None:
        self._is_on = True
        self._lost = 0.0
        self._num_seen = self._num_kept = self._num_unseen = 0

    def _turn_off(self) -> None:
        self._is_on = False
        self._num_off = 0

    def _of(self, num_rows: int) -> _Size:
        rows = row_class(num_rows)
        if rows not in self._sizes:
            self._sizes[rows] = _Size(START_BASE + START_PER_ROW * rows if self._catches_up else LEAST_START)
        return self._sizes[rows]

    def _price(self, num_rows: int) -> float | None:
        """Of steps with so many rows; if that is not known, of those with the next number, but not one far from it."""
        known = {max(rows / num_rows, num_rows / rows): size.price for rows, size in self._sizes.items() if size.price}
        nearest = min(known, default=math.inf)
        return known[nearest] if nearest <= FAR else None
