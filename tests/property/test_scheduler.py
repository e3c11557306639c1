"""Whatever arrives, is cancelled, fails or runs out of blocks: the rules of the simulation hold after each step."""

import pytest

from tests.property.simulation import Simulation

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority"])


def run_seeds(seeds: range, *, depth: int, policy: str, num_steps: int, writes_kv: bool = False) -> None:
    num_finished = num_preemptions = num_hits = num_accepted = 0
    for seed in seeds:
        simulation = Simulation(seed, depth=depth, policy=policy, writes_kv=writes_kv)
        try:
            simulation.run(num_steps)
        except AssertionError as error:
            error.add_note(f"Simulation({seed}, {depth=}, {policy=}, {writes_kv=}).run({num_steps})")
            raise
        num_finished += simulation.num_finished
        counters = simulation.scheduler.counters
        num_preemptions += counters.num_preemptions
        num_hits += counters.prefix_hit_tokens
        num_accepted += sum(counters.accepted)
    # Otherwise the rules held because nothing happened.
    assert min(num_finished, num_preemptions, num_hits, num_accepted) > len(seeds)


@DEPTHS
@POLICIES
def test_random_traffic(depth: int, policy: str) -> None:
    run_seeds(range(40), depth=depth, policy=policy, num_steps=120)


@DEPTHS
@POLICIES
def test_random_traffic_with_drafts_that_are_written(depth: int, policy: str) -> None:
    """Nobody reads what they leave, no block is written by two, the newest token has one always."""
    run_seeds(range(500, 530), depth=depth, policy=policy, num_steps=120, writes_kv=True)


@pytest.mark.full
@pytest.mark.parametrize("writes_kv", [False, True])
@DEPTHS
@POLICIES
def test_much_random_traffic(depth: int, policy: str, writes_kv: bool) -> None:
    run_seeds(range(1000, 1200), depth=depth, policy=policy, num_steps=400, writes_kv=writes_kv)
