"""The policy on simulated devices and proposers: never slower than off, and close to the best fixed number."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from server.scheduler.auto_policy import CANDIDATES, AutoPolicy
from server.scheduler.draft_policy import Allowance, DraftPolicy, FixedPolicy

K = 8
WARM_UP = 50
STEPS = 400
SEEDS = range(3)


@dataclass(frozen=True)
class World:
    """A device and a workload.

    Attributes:
        acceptance: chance that a draft is kept if those before it were.
        availability: share of rows for which drafts are found.
        verify_s: what a token of a row adds to a step, beside 1 for the step.
        propose_s: what proposing one draft for each row takes, for a few rows.
    """

    acceptance: float
    verify_s: float
    propose_s: float = 0.0
    availability: float = 1.0

    def duration_s(self, num_rows: int, num_drafts: int, next_drafts: int) -> float:
        return 1.0 + self.verify_s * (num_rows + num_drafts) + self.propose_s * next_drafts * (1 + num_rows / 16)


CPU_ALONE = World(0.7, 0.01)
CPU_BATCH = World(0.7, 0.06)
WORLDS = {
    "free drafts that are right": World(0.95, 0.0),
    "a cheap n-gram that is right": World(0.8, 0.02, availability=0.5),
    "a draft model that is right": World(0.8, 0.02, 0.05),
    "one that is seldom right": World(0.2, 0.03, 0.03),
    "random drafts, cheap": World(0.0, 0.01),
    "random drafts, expensive": World(0.0, 0.05, 0.1),
    "a large batch": CPU_BATCH,
}


def run(
    policy: DraftPolicy,
    world: Callable[[int], World],
    num_rows: Callable[[int], int],
    steps: int = STEPS,
    *,
    seed: int = 1,
    noise: float = 0.1,
) -> list[tuple[int, float]]:
    """Tokens and seconds of each step."""
    rng = random.Random(seed)
    results: list[tuple[int, float]] = []
    proposed = Allowance(0, 0)
    for step in range(steps):
        rows, now = num_rows(step), world(step)
        allowance = policy.allow(rows)
        tokens = num_drafts = 0
        for row in range(rows):
            allowed = min(allowance.of_row(row, rows), proposed.next_drafts)
            found = allowed if rng.random() < now.availability else 0
            kept = 0
            while kept < found and rng.random() < now.acceptance:
                kept += 1
            policy.settle_row(allowance, allowed, kept)
            tokens += 1 + kept
            num_drafts += found
        duration_s = now.duration_s(rows, num_drafts, allowance.next_drafts) * rng.uniform(1 - noise, 1 + noise)
        policy.settle_step(allowance, rows, duration_s)
        results.append((tokens, duration_s))
        proposed = allowance
    return results


def auto() -> DraftPolicy:
    return AutoPolicy(K)


def rate(results: list[tuple[int, float]], first: int = 0, end: int | None = None) -> float:
    """Tokens per second."""
    part = results[first:end]
    return sum(tokens for tokens, _ in part) / sum(duration_s for _, duration_s in part)


def mean_rate(
    policy: Callable[[], DraftPolicy],
    world: Callable[[int], World],
    num_rows: Callable[[int], int],
    first: int,
    end: int | None,
) -> float:
    """Of some seeds."""
    runs = [run(policy(), world, num_rows, end or STEPS, seed=seed) for seed in SEEDS]
    return sum(rate(results, first, end) for results in runs) / len(runs)


def best_fixed(world: Callable[[int], World], num_rows: Callable[[int], int], first: int, end: int | None) -> float:
    candidates = [number for number in CANDIDATES if number <= K]
    return max(mean_rate(partial(FixedPolicy, number), world, num_rows, first, end) for number in candidates)


@pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
@pytest.mark.parametrize("name", WORLDS)
def test_close_to_the_best_fixed_number(name: str, num_rows: int) -> None:
    def world(_: int) -> World:
        return WORLDS[name]

    def rows(_: int) -> int:
        return num_rows

    mean = mean_rate(auto, world, rows, WARM_UP, None)
    assert mean >= 0.95 * best_fixed(world, rows, WARM_UP, None)
    assert mean >= 0.98 * mean_rate(partial(FixedPolicy, 0), world, rows, WARM_UP, None)


def test_a_change_of_workload_is_noticed() -> None:
    def world(step: int) -> World:
        return World(0.0, 0.05) if 150 <= step < 300 else World(0.9, 0.02)

    def rows(_: int) -> int:
        return 8

    for first, end in ((50, 150), (200, 300), (350, 450)):
        assert mean_rate(auto, world, rows, first, end) >= 0.95 * best_fixed(world, rows, first, end)


def test_an_unlucky_step_of_a_large_batch_does_not_turn_drafts_off() -> None:
    """Half of the rows keep theirs, which pays; each is a sample, but those of one step are alike."""
    policy = AutoPolicy(1)
    for is_lucky in (*(True,) * 60, False):
        allowance = policy.allow(16)
        for row in range(16):
            allowed = allowance.of_row(row, 16)
            policy.settle_row(allowance, allowed, allowed * (is_lucky and row % 2 == 0))
        policy.settle_step(allowance, 16, 1.33 if allowance.max_drafts else 1.0)
    assert allowance.max_drafts == 1
    assert policy.allow(16) == Allowance(1, 1)


def test_a_change_of_load_is_noticed() -> None:
    def rows(step: int) -> int:
        return 32 if 150 <= step < 300 else 1

    def world(step: int) -> World:
        return CPU_BATCH if rows(step) > 1 else CPU_ALONE

    for first, end in ((50, 150), (200, 300), (320, 450)):
        assert mean_rate(auto, world, rows, first, end) >= 0.95 * best_fixed(world, rows, first, end)


def test_a_pause_of_the_machine_is_not_held_against_anybody() -> None:
    policy = AutoPolicy(K)
    good = World(0.9, 0.01)
    run(policy, lambda _: good, lambda _: 4, 100)
    policy.settle_step(Allowance(K, K), 4, 1000.0)
    assert rate(run(policy, lambda _: good, lambda _: 4, 60)) >= 0.95 * best_fixed(lambda _: good, lambda _: 4, 0, 60)


@pytest.mark.parametrize("paused_drafts", [0, 1, 3, 8])
def test_a_pause_while_a_number_is_tried_is_not_held_against_it(paused_drafts: int) -> None:
    class Paused(AutoPolicy):
        """Of the steps that count for the number the first takes five times as long."""

        is_paused = False

        def settle_step(self, allowance: Allowance, num_rows: int, duration_s: float) -> None:
            if allowance.is_steady and allowance.max_drafts == paused_drafts and not self.is_paused:
                self.is_paused, duration_s = True, 5 * duration_s
            super().settle_step(allowance, num_rows, duration_s)

    policy = Paused(K)
    results = run(policy, lambda _: CPU_ALONE, lambda _: 1, WARM_UP + 100)
    assert policy.is_paused
    fixed = run(FixedPolicy(K), lambda _: CPU_ALONE, lambda _: 1, WARM_UP + 100)
    assert rate(results, WARM_UP) >= 0.95 * rate(fixed, WARM_UP)


def test_a_proposer_that_has_to_catch_up_is_looked_at_seldom() -> None:
    """What it left undone while it was not asked it does when it is."""
    policy = AutoPolicy(K)
    num_idle, seconds, steps = 0, 0.0, 3000
    for step in range(WARM_UP + steps):
        allowance = policy.allow(8)
        catch_up_s = min(0.1 * num_idle, 3.0) if allowance.next_drafts else 0.0
        num_idle = 0 if allowance.next_drafts else num_idle + 1
        for row in range(8):
            policy.settle_row(allowance, allowance.of_row(row, 8), 0)
        duration_s = 1.0 + 0.2 * (allowance.max_drafts + allowance.num_probed / 8) + catch_up_s
        policy.settle_step(allowance, 8, duration_s)
        seconds += duration_s if step >= WARM_UP else 0.0
    assert seconds <= steps / 0.98


def test_drafts_that_nearly_pay_are_not_tried_again_and_again() -> None:
    """A large batch and a network: one draft takes 1.75 steps, is kept by 0.65 of the rows, and turning it on 1.5."""
    policy, rng = AutoPolicy(K), random.Random(1)
    tokens = seconds = 0.0
    num_started = proposed = 0
    for _ in range(6000):
        allowance = policy.allow(16)
        num_started = num_started + 1 if allowance.next_drafts else 0
        num_drafts = 0
        for row in range(16):
            allowed = min(allowance.of_row(row, 16), proposed)
            kept = 0
            while kept < allowed and rng.random() < 0.65:
                kept += 1
            policy.settle_row(allowance, allowed, kept)
            tokens, num_drafts = tokens + 1 + kept, num_drafts + allowed
        proposed = allowance.next_drafts
        duration_s = 1.0 + 0.75 * (num_started in (1, 2)) + 0.25 * proposed + 0.5 * num_drafts / 16
        policy.settle_step(allowance, 16, duration_s * rng.uniform(0.9, 1.1))
        seconds += duration_s
    assert tokens / seconds >= 0.98 * 16


def test_a_number_that_seemed_too_dear_is_tried_again() -> None:
    policy = AutoPolicy(K)
    run(policy, lambda step: World(0.95, 0.01 if step < 30 else 0.5), lambda _: 1, 60)
    results = run(policy, lambda _: World(0.95, 0.01), lambda _: 1, 400)
    assert rate(results, 300) >= 0.95 * best_fixed(lambda _: World(0.95, 0.01), lambda _: 1, 300, None)


def test_text_that_begins_to_repeat_itself_is_noticed_at_once() -> None:
    """Rows keep all their drafts or none: later positions are as good as they were before the first one failed."""

    def world(step: int) -> World:
        return World(0.98, 0.02, availability=0.15 if step % 60 < 30 else 1.0)

    results = run(AutoPolicy(K), world, lambda _: 4, 420)
    fixed = [run(FixedPolicy(number), world, lambda _: 4, 420) for number in CANDIDATES if number <= K]
    assert rate(results, 60) >= 0.95 * max(rate(each, 60) for each in fixed)


def test_a_step_counts_for_as_many_drafts_as_were_proposed_for_it() -> None:
    policy = AutoPolicy(K)
    verified = before = Allowance(0, 0)
    for _ in range(40):
        verified = policy.allow(1)
        keeps_on = verified.max_drafts == verified.next_drafts <= before.next_drafts
        assert verified.is_steady == (keeps_on and verified.num_probed == 0)
        policy.settle_row(verified, min(verified.max_drafts, before.next_drafts), 0 if before.next_drafts == 0 else 1)
        policy.settle_step(verified, 1, 1.0)
        before = verified


def test_a_probe_takes_few_rows_by_turns() -> None:
    allowance = Allowance(0, 0, probed_drafts=1, num_probed=2, first_probed=7)
    assert [allowance.of_row(i, 8) for i in range(8)] == [1, 0, 0, 0, 0, 0, 0, 1]
    assert [Allowance(3, 3).of_row(i, 4) for i in range(4)] == [3] * 4


def test_a_batch_of_new_sequences_is_judged_by_its_size() -> None:
    policy = AutoPolicy(K)
    run(policy, lambda _: CPU_ALONE, lambda _: 1, 60)
    run(policy, lambda _: World(0.7, 0.5), lambda _: 16, 100)
    run(policy, lambda _: CPU_ALONE, lambda _: 1, 60)
    assert policy.allow(0, 1).max_drafts > 0
    assert policy.allow(0, 16).max_drafts == 0


def test_a_schedule_by_batch_size() -> None:
    policy = FixedPolicy(5, {8: 3, 32: 0})
    assert [policy.allow(rows).max_drafts for rows in (1, 7, 8, 31, 32, 64)] == [5, 5, 3, 3, 0, 0]
