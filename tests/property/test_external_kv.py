"""Whatever a connector answers, brings, loses or delays: the rules of the simulation hold after each step."""

import pytest

from tests.property.connected_simulation import Nodes

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority"])


def run_seeds(seeds: range, *, depth: int, policy: str, num_steps: int) -> None:
    counts = [0] * 9
    for seed in seeds:
        nodes = Nodes(seed, depth=depth, policy=policy)
        try:
            nodes.run(num_steps)
        except Exception as error:
            error.add_note(f"Nodes({seed}, {depth=}, {policy=}).run({num_steps})")
            raise
        for node in nodes.nodes:
            counters, connector = node.scheduler.counters, node.connector
            found = (
                node.num_finished,
                node.num_handed_on,
                counters.external_loaded_tokens,
                counters.num_failed_loads,
                connector.num_loads,
                connector.num_bad_blocks,
                connector.num_saves,
                connector.num_announced,
                connector.num_leases,
            )
            counts = [one + other for one, other in zip(counts, found, strict=True)]
    # Otherwise the rules held because nothing happened.
    assert min(counts) > len(seeds), counts


@DEPTHS
@POLICIES
def test_random_transfers(depth: int, policy: str) -> None:
    run_seeds(range(8), depth=depth, policy=policy, num_steps=120)


@pytest.mark.full
@DEPTHS
@POLICIES
def test_many_random_transfers(depth: int, policy: str) -> None:
    run_seeds(range(1000, 1050), depth=depth, policy=policy, num_steps=400)
