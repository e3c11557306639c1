"""How many drafts each row may verify in a step: never so many that a step brings less than it costs.

Tokens per second of a step are (1 + expected accepted drafts of a row) / its duration. Both are measured while
serving, for each number of drafts k that is tried, and the best k is taken. No model of the device is needed, and
none of the proposer: what a draft costs is in the step's duration.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from server.speculative_config import PolicyConfig

CANDIDATES = (0, 1, 2, 3, 5, 8, 13, 21, 32)
TRIES = 2
"""Steps that each promising number of drafts is tried for at first, with about so many rows; the shortest counts."""
PROBE_INTERVAL = 12
"""Least steps between two looks at what more drafts would bring; after a surprise the next one comes at once."""
PROBED_SHARE = 4
"""At most one row in so many is probed, or one."""
PROBE_COST = 0.01
"""The share of all time that looking may take; it is dearer where drafts are, and then done more seldom."""
SURPRISE = 0.25
"""So much larger a share of a probe's rows than expected keeps its drafts."""
MAX_PROBE_INTERVAL = 256
MAX_PROBE_COST = 2.0
"""More usual steps than this are not held against a step of a probe: the machine paused."""
ACCEPTANCE_MEMORY = 24
PRIOR_WEIGHT = 8
DURATION_MEMORY = 8
"""Rows, and steps, after which what was measured counts for little."""
DURATION_AGE = 256
"""Steps of fewer drafts after which a duration that was not measured again is forgotten."""
LONGEST_SAMPLE = 1.5
"""A step that takes longer than so many usual ones was held up by something else, and counts as that many."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a step may verify, and what it is to prepare for the next one.

    Attributes:
        max_drafts: most drafts of a row.
        probed_drafts, num_probed: most drafts of so many rows instead, from `first_probed` on.
        next_drafts: most drafts of a row that are proposed for the step after.
        is_steady: whether the step verifies what it may, and proposes as many: its duration says what they cost.
    """

    max_drafts: int
    next_drafts: int
    probed_drafts: int = 0
    num_probed: int = 0
    first_probed: int = 0
    is_steady: bool = True

    def of_row(self, index: int, num_rows: int) -> int:
        """Most drafts of one of the step's rows."""
        if self.num_probed and (index - self.first_probed) % num_rows < self.num_probed:
            return self.probed_drafts
        return self.max_drafts


class DraftPolicy(Protocol):
    """Decides for each step; owned by the scheduler.

    Attributes:
        is_adaptive: whether it verifies fewer drafts where they do not pay.
    """

    is_adaptive: ClassVar[bool]

    def allow(self, num_rows: int) -> Allowance:
        """For the next step, which will have about so many rows."""

    def settle_row(self, allowance: Allowance, allowed: int, num_accepted: int) -> None:
        """Learn from a row that was allowed to verify `allowed` drafts."""

    def settle_step(self, allowance: Allowance, num_rows: int, duration_s: float) -> None:
        """Learn from a step in which all rows decoded."""


class FixedPolicy:
    """As many as configured, by the number of rows if so wished."""

    is_adaptive: ClassVar[bool] = False

    def __init__(self, max_drafts: int, by_batch_size: Mapping[int, int] | None = None) -> None:
        """Args: by_batch_size: from so many rows on so many drafts; below the least of them max_drafts."""
        self._max_drafts = max_drafts
        self._by_batch_size = sorted((by_batch_size or {}).items())

    def allow(self, num_rows: int) -> Allowance:
        """By the number of rows alone."""
        drafts = self._max_drafts
        for least, number in self._by_batch_size:
            if num_rows >= least:
                drafts = min(number, self._max_drafts)
        return Allowance(drafts, drafts)

    def settle_row(self, allowance: Allowance, allowed: int, num_accepted: int) -> None:
        """Learns nothing."""

    def settle_step(self, allowance: Allowance, num_rows: int, duration_s: float) -> None:
        """Learns nothing."""


@dataclass(slots=True)
class _Mean:
    """A running mean that forgets."""

    value: float
    count: int = 0

    def add(self, sample: float, memory: int) -> None:
        self.count += 1
        self.value += (sample - self.value) / min(self.count, memory)


class _Durations:
    """Of steps with about the same number of rows, by the drafts that their rows were allowed.

    Only what is chosen is measured. So a number that seemed too dear is forgotten after a while, to be tried again.

    Attributes:
        probe_cost: of each of a probe's two steps, in usual steps.
        next_probe: the policy's step from which on one is due.
    """

    def __init__(self, next_probe: int) -> None:
        self._by_drafts: dict[int, _Mean] = {}
        self._last_step: dict[int, int] = {}
        self._num_steps = 0
        self.probe_cost = _Mean(0.0)
        self.next_probe = next_probe

    def add(self, drafts: int, duration_s: float) -> None:
        mean = self._by_drafts.setdefault(drafts, _Mean(duration_s))
        if mean.count < TRIES:
            mean.count, mean.value = mean.count + 1, min(mean.value, duration_s)
        else:
            mean.add(min(duration_s, LONGEST_SAMPLE * mean.value), DURATION_MEMORY)
        self._num_steps += 1
        self._last_step[drafts] = self._num_steps
        oldest = self._num_steps - DURATION_AGE
        for number in [each for each, step in self._last_step.items() if each > drafts and step < oldest]:
            del self._by_drafts[number], self._last_step[number]

    def num_tries(self, drafts: int) -> int:
        return self._by_drafts[drafts].count if drafts in self._by_drafts else 0

    def estimate(self, drafts: int) -> float:
        """What was measured, of no more than larger numbers take, or the line through the two largest smaller ones.

        With one or none of these all are alike.
        """
        known = {number: mean.value for number, mean in self._by_drafts.items() if mean.count >= TRIES}
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
        self._keeps = [_Mean(0.0) for _ in range(max_drafts)]  # the chance of draft i if those before it were kept
        self._durations: dict[int, _Durations] = {}
        self._num_steps = 0
        self._num_probes = 0
        self._probes_next = False
        self._num_proposed = 0  # for the next step
        self._num_kept = 0
        self._expected_kept = 0.0

    def allow(self, num_rows: int) -> Allowance:
        """The best number of drafts so far; now and then a few rows try one size more."""
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
            self._keeps[i].add(float(num_accepted > i), ACCEPTANCE_MEMORY)

    def settle_step(self, allowance: Allowance, num_rows: int, duration_s: float) -> None:
        """Take in a duration; what a probe, or proposing for one, takes besides, is its cost."""
        durations = self._with_rows(num_rows)
        if allowance.is_steady:
            durations.add(allowance.max_drafts, duration_s)
            return
        if allowance.num_probed and self._num_kept / allowance.num_probed > self._expected_kept + SURPRISE:
            durations.next_probe = self._num_steps
        is_for_probe = allowance.num_probed > 0 or allowance.next_drafts > allowance.max_drafts
        if is_for_probe and durations.num_tries(allowance.max_drafts) >= TRIES:
            extra = duration_s / durations.estimate(allowance.max_drafts) - 1.0
            durations.probe_cost.add(min(max(0.0, extra), MAX_PROBE_COST), DURATION_MEMORY)

    def _with_rows(self, num_rows: int) -> _Durations:
        size = _size(num_rows)
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


def make_policy(config: PolicyConfig, max_drafts: int) -> DraftPolicy:
    """The policy that is configured."""
    by_batch_size = config.num_speculative_tokens_per_batch_size
    if by_batch_size is None and config.policy == "auto":
        return AutoPolicy(max_drafts)
    return FixedPolicy(max_drafts, by_batch_size)


def _size(num_rows: int) -> int:
    """Numbers of rows that are measured together: up to 4 each alone, then by powers of two."""
    return num_rows if num_rows <= 4 else 1 << (num_rows - 1).bit_length()
