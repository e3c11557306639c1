"""Verifies as many drafts as pay: never so many that a step brings less than it costs.

Tokens per second of a step are (1 + expected accepted drafts of a row) / its duration. Both are measured while
serving, for each number of drafts k that is tried, and the best k is taken. No model of the device is needed, and
none of the proposer: what a draft costs is in the step's duration.
"""

import math
from typing import ClassVar

from server.scheduler.draft_policy import Allowance
from server.scheduler.measurements import TRIES, Duration, Mean, row_class

CANDIDATES = (0, 1, 2, 3, 5, 8, 13, 21, 32)
PROBE_INTERVAL = 12
"""Least steps between two looks at what more drafts would bring; after a surprise the next one comes at once."""
PROBED_SHARE = 4
"""At most one row in so many is probed, or one."""
PROBE_COST = 0.01
"""The share of all time that looking may take; it is dearer where drafts are, and then done more seldom."""
SURPRISE, SURPRISE_DEVIATIONS = 0.25, 1.5
"""So much larger a share of a probe's rows than expected keeps its drafts, and so many standard deviations."""
MAX_PROBE_INTERVAL = 256
MAX_PROBE_COST = 2.0
"""More usual steps than this are not held against a step of a probe: the machine paused."""
PROBE_COST_MEMORY = 8
ACCEPTANCE_MEMORY, STEPS_REMEMBERED = 24, 3
"""Steps of probes, and rows, or the rows of so many steps if these are more, after which what was measured counts for
little: those of a step and a half of a large batch would turn drafts off and on by chance."""
PRIOR_WEIGHT = 8
"""Rows that a position counts as which is thought to go on as the one before it."""
DURATION_AGE, MAX_DURATION_AGE = 256, 2048
"""Steps of fewer drafts after which a duration that was not measured again is forgotten, at first and at last: twice as
many each time, as the machine was not held up by chance when a number was too dear again and again."""


class _Durations:
    """Of steps with about the same number of rows, by the drafts that their rows were allowed.

    Only what is chosen is measured. So a number that seemed too dear is forgotten after a while, to be tried again.

    Attributes:
        probe_cost: of each of a probe's two steps, in usual steps.
        next_probe: the policy's step from which on one is due.
    """

    def __init__(self, next_probe: int) -> None:
        self._by_drafts: dict[int, Duration] = {}
        self._last_step: dict[int, int] = {}
        self._ages: dict[int, int] = {}
        self._num_steps = 0
        self.probe_cost = Mean(0.0)
        self.next_probe = next_probe

    def add(self, drafts: int, duration_s: float) -> None:
        self._by_drafts.setdefault(drafts, Duration()).add(duration_s)
        self._num_steps += 1
        self._last_step[drafts] = self._num_steps
        for number in [each for each in self._last_step if each > drafts]:
            age = self._ages.get(number, DURATION_AGE)
            if self._num_steps - self._last_step[number] > age:
                del self._by_drafts[number], self._last_step[number]
                self._ages[number] = min(2 * age, MAX_DURATION_AGE)

    def num_tries(self, drafts: int) -> int:
        return self._by_drafts[drafts].count if drafts in self._by_drafts else 0

    def estimate(self, drafts: int) -> float:
        """What was measured, of no more than larger numbers take, or the line through the two largest smaller ones.

        With one or none of these all are alike.
        """
        known = {number: each.seconds for number, each in self._by_drafts.items() if each.is_known}
        if drafts in known:
            return min(duration_s for number, duration_s in known.items() if number >= drafts)
        fewer = sorted(number for number in known if number < drafts)[-2:]
        if len(fewer) < 2:
            return known[fewer[0]] if fewer else 1.0
        low, high = (known[number] for number in fewer)
        return high + max(0.0, high - low) * (drafts - fewer[1]) / (fewer[1] - fewer[0])


class AutoPolicy:
    """Takes the number of drafts with the most tokens per second."""

    is_adaptive: ClassVar[bool] = True

    def __init__(self, max_drafts: int) -> None:
        self._candidates = [*(number for number in CANDIDATES if number < max_drafts), max_drafts]
        self._keeps = [Mean(0.0) for _ in range(max_drafts)]  # the chance of draft i if those before it were kept
        self._durations: dict[int, _Durations] = {}
        self._memory = ACCEPTANCE_MEMORY
        self._num_steps = 0
        self._num_probes = 0
        self._probes_next = False
        self._num_proposed = 0  # for the next step
        self._num_kept = 0
        self._expected_kept = 0.0

    def allow(self, num_rows: int, num_new: int = 0) -> Allowance:
        """The best number of drafts so far; now and then a few rows try one size more."""
        num_rows = max(1, num_rows or num_new)
        self._memory = max(ACCEPTANCE_MEMORY, STEPS_REMEMBERED * num_rows)
        durations = self._with_rows(num_rows)
        best = self._best(durations)
        more = min([number for number in self._candidates if number > best], default=0)
        self._num_steps += 1
        is_probe = self._probes_next and more > 0
        self._probes_next = more > 0 and self._num_steps >= durations.next_probe and not is_probe
        next_drafts = more if self._probes_next else best
        is_steady = not is_probe and next_drafts == best <= self._num_proposed
        self._num_proposed = next_drafts
        if is_probe:
            num_probed = self._num_probed(durations, best, more, num_rows)
            self._num_kept, self._expected_kept = 0, self._gain(best + 1) - self._gain(best)
            self._num_probes += 1
            interval = max(PROBE_INTERVAL, min(2 * durations.probe_cost.value / PROBE_COST, MAX_PROBE_INTERVAL))
            durations.next_probe = self._num_steps + int(interval)
            first_probed = self._num_probes * num_probed % num_rows
            return Allowance(best, next_drafts, more, num_probed, first_probed, is_steady)
        return Allowance(best, next_drafts, is_steady=is_steady)

    def settle_row(self, allowance: Allowance, allowed: int, num_accepted: int) -> None:
        """Take in how many drafts a row kept of those it might have had."""
        self._num_kept += num_accepted > allowance.max_drafts
        for i in range(min(allowed, num_accepted + 1)):
            self._keeps[i].add(float(num_accepted > i), self._memory)

    def settle_step(self, allowance: Allowance, num_rows: int, duration_s: float) -> None:
        """Take in a duration; what a probe, or proposing for one, takes besides, is its cost."""
        durations = self._with_rows(num_rows)
        if allowance.is_steady:
            durations.add(allowance.max_drafts, duration_s)
            return
        if allowance.num_probed and self._is_surprising(allowance.num_probed):
            durations.next_probe = self._num_steps
        is_for_probe = allowance.num_probed > 0 or allowance.next_drafts > allowance.max_drafts
        if is_for_probe and durations.num_tries(allowance.max_drafts) >= TRIES:
            extra = duration_s / durations.estimate(allowance.max_drafts) - 1.0
            durations.probe_cost.add(min(max(0.0, extra), MAX_PROBE_COST), PROBE_COST_MEMORY)

    def _is_surprising(self, num_probed: int) -> bool:
        """Whether more rows of a probe kept its drafts than chance explains."""
        expected = self._expected_kept
        deviation = math.sqrt(max(0.0, expected * (1.0 - expected)) / num_probed)
        return self._num_kept / num_probed > expected + max(SURPRISE, SURPRISE_DEVIATIONS * deviation)

    def _with_rows(self, num_rows: int) -> _Durations:
        size = row_class(num_rows)
        if size not in self._durations:
            self._durations[size] = _Durations(self._num_steps + PROBE_INTERVAL)
        return self._durations[size]

    def _num_probed(self, durations: _Durations, best: int, more: int, num_rows: int) -> int:
        """As many rows as a quarter, or as PROBE_COST pays for; at least one."""
        most = -(-num_rows // PROBED_SHARE)
        extra = durations.estimate(more) / durations.estimate(best) - 1.0  # if all rows were probed
        paid = PROBE_COST * PROBE_INTERVAL * num_rows / extra if extra > 0 else most
        return max(1, min(most, int(paid)))

    def _best(self, durations: _Durations) -> int:
        """The number with the best rate; one that was hardly tried counts as tried if it would be the best."""
        best, best_rate = 0, 0.0
        for drafts in self._candidates:
            rate = (1.0 + self._gain(drafts)) / durations.estimate(drafts)
            if rate > best_rate:
                best, best_rate = drafts, rate
            if durations.num_tries(drafts) < TRIES and best == drafts:
                break  # larger numbers are judged by what this one takes
        return best

    def _gain(self, drafts: int) -> float:
        """Expected drafts that a row keeps of so many.

        A position that was seldom reached is thought to go on as the one before it.
        """
        gain, reach, chance = 0.0, 1.0, 1.0
        for i, mean in enumerate(self._keeps[:drafts]):
            weight = min(mean.count, ACCEPTANCE_MEMORY)
            trust = PRIOR_WEIGHT if i > 0 or weight == 0 else 0
            chance = (weight * mean.value + trust * chance) / (weight + trust)
            reach *= chance
            gain += reach
        return gain
