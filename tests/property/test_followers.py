"""Random traffic on networks that follow the target: what they draft from is right, however they came to it."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

import proposers.drafting
from tests.fakes.followed_executor import FollowedExecutor
from tests.property.simulation import Simulation

KEPT = 12
DEPTHS = pytest.mark.parametrize("depth", [0, 1])
FED = pytest.mark.parametrize("is_fed", [False, True], ids=["tokens", "features"])


@pytest.fixture(autouse=True)
def _few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are chunks that are longer, and gaps beyond it."""
    monkeypatch.setattr(proposers.drafting, "KEPT", KEPT)
    monkeypatch.setattr(proposers.drafting, "LONGEST_GAP", KEPT - 6)  # of at most 5 drafts and the token before


def simulations(seeds: range, depth: int) -> Iterator[tuple[int, Simulation]]:
    """By seed, those that draft."""
    for seed in seeds:
        simulation = Simulation(seed, depth=depth, policy="fcfs", writes_kv=True, executor_class=FollowedExecutor)
        if simulation.max_drafts:
            yield seed, simulation


def run(seed: int, simulation: Simulation, *, is_fed: bool, off_rate: float, has_limit: bool = False) -> Counter[str]:
    """A simulation with a follower, to its end. Returns: how often something happened."""
    executor = simulation.core.executor
    assert isinstance(executor, FollowedExecutor)
    executor.attach(
        random.Random(seed),
        num_slots=simulation.config["max_num_seqs"],
        num_blocks=simulation.pool.num_usable,
        is_fed=is_fed,
        max_num_tokens=20 if has_limit else None,
        off_rate=off_rate,
    )
    try:
        simulation.run(100)
    except AssertionError as error:
        error.add_note(f"{seed=}, depth={simulation.depth}, {is_fed=}, {off_rate=}, {has_limit=}")
        raise
    return executor.counts


def run_on_and_off(monkeypatch: pytest.MonkeyPatch, seeds: range, depth: int, *, is_fed: bool) -> None:
    counts = Counter[str]()
    for seed, simulation in simulations(seeds, depth):
        monkeypatch.setitem(proposers.drafting.CATCH_UP, "cpu", (3, 20, 1000)[seed % 3])
        counts += run(seed, simulation, is_fed=is_fed, off_rate=0.2, has_limit=seed % 4 == 0)
    assert counts["drafted"] > 10 * len(seeds)
    assert counts["behind"] > len(seeds) / 2
    assert (counts["attends to less"] > len(seeds)) == is_fed


@FED
@DEPTHS
def test_drafts_are_made_of_what_is_right(monkeypatch: pytest.MonkeyPatch, depth: int, is_fed: bool) -> None:
    """Off and on again, chunks, prefix hits, preemptions, errors; with a budget of catching up that is soon spent."""
    run_on_and_off(monkeypatch, range(18), depth, is_fed=is_fed)


@pytest.mark.full
@FED
@DEPTHS
def test_much_is_made_of_what_is_right(monkeypatch: pytest.MonkeyPatch, depth: int, is_fed: bool) -> None:
    run_on_and_off(monkeypatch, range(1000, 1200), depth, is_fed=is_fed)


@FED
@DEPTHS
def test_who_is_never_off_lacks_nothing(monkeypatch: pytest.MonkeyPatch, depth: int, is_fed: bool) -> None:
    """No prefix hit and no preemption makes a network attend to less."""
    monkeypatch.setitem(proposers.drafting.CATCH_UP, "cpu", 1000)
    counts, num_hits, num_preemptions = Counter[str](), 0, 0
    for seed, simulation in simulations(range(14), depth):
        counts += run(seed, simulation, is_fed=is_fed, off_rate=0.0)
        num_hits += simulation.scheduler.counters.prefix_hit_tokens
        num_preemptions += simulation.scheduler.counters.num_preemptions
    assert counts["drafted"] > 200
    assert min(num_hits, num_preemptions) > 10
    assert counts["behind"] == counts["attends to less"] == 0
