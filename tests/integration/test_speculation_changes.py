"""Streams that live through many changes of speculation bring what they would have brought without any."""

import random
from collections.abc import Callable
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest

from server.events import Event, StepFinished
from server.request import SamplingParams
from server.speculation_state import ProposerChange, SpeculationChange, SpeculationState
from tests.fakes.engine_under_test import EngineUnderTest, engine_on
from tests.tiny_model import build_tiny_model

SUFFIX = {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_spec_factor": 4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
CONFIGS: dict[str, list[dict[str, object]]] = {
    "suffix": [SUFFIX],
    "ngram": [NGRAM],
    "ngram, suffix": [{**NGRAM, "num_speculative_tokens": 2}, SUFFIX],
    "layer skip": [{"method": "layer_skip", "num_layers": 1, "num_speculative_tokens": 4}],
}
PARAMETERS: dict[object, list[dict[str, object]]] = {
    "layer_skip": [],
    "ngram": [
        {"match": "last"},
        {"prompt_lookup_min": 3},
        {"prompt_lookup_min": 1, "prompt_lookup_max": 1},
        {"match": "first", "prompt_lookup_max": 3},
    ],
    "suffix": [
        {"suffix_decoding_max_spec_factor": 2},
        {"suffix_decoding_max_cached_requests": 0},
        {"suffix_decoding_max_tree_depth": 5, "suffix_decoding_max_cached_requests": 40},
        {"suffix_decoding_max_spec_factor": 4, "suffix_decoding_min_token_prob": 0},
    ],
}
GENERAL = [
    SpeculationChange(num_speculative_tokens=1),
    SpeculationChange(num_speculative_tokens=4),
    SpeculationChange(enabled=False),
    SpeculationChange(enabled=True),
    SpeculationChange(policy={"num_speculative_tokens_per_batch_size": {1: 4, 4: 2}}),
    SpeculationChange(policy={"policy": "auto"}),
    SpeculationChange(policy={"policy": "fixed"}, num_speculative_tokens=3),
    SpeculationChange(enabled=False, num_speculative_tokens=2),
    SpeculationChange(enabled=True, num_speculative_tokens=4),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("changes"))


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that repeat themselves, greedy and seeded by turns."""
    rng = random.Random(5)
    prompts, params = [], []
    for number in range(16):
        piece = [rng.randrange(3, 400) for _ in range(rng.randint(1, 5))]
        prompts.append([number + 3, *piece * rng.randint(2, 4)])
        how: dict[str, Any] = {"temperature": 0} if number % 2 else {"temperature": 0.7, "seed": number}
        params.append(SamplingParams(max_tokens=60, ignore_eos=True, n=1 + number % 2, **how))
    return prompts, params


def generate(engine: EngineUnderTest, **options: Any) -> list[list[int]]:
    """The tokens of all choices of all requests."""
    return [choice.token_ids for outcome in engine.generate(*requests(), **options) for choice in outcome.choices]


@pytest.fixture(scope="module")
def expected(folder: Path, device_name: str) -> list[list[int]]:
    """What is generated without speculation."""
    with engine_on(folder, device_name) as engine:
        return generate(engine)


def changes_of(config: list[dict[str, object]]) -> list[SpeculationChange]:
    """The general ones, with the parameters of each member in between."""
    parameters = [
        SpeculationChange(proposers=[ProposerChange(member=place, parameters=values)])
        for place, member in enumerate(config)
        for values in PARAMETERS[member["method"]]
    ]
    # 4 or 8 parameters behind 9 general ones: in time each comes behind each.
    pairs = zip(GENERAL * 8, cycle(parameters or GENERAL), strict=False)
    return [change for pair in pairs for change in pair]


def change_with_steps(engine: EngineUnderTest, changes: list[SpeculationChange]) -> Callable[[], int]:
    """A change is on its way to the step thread whenever four steps have settled. Returns: their number."""
    numbers, upcoming = count(1), cycle(changes)
    made: list[SpeculationState] = []

    def change() -> None:
        made.append(engine.core.engine._speculation.apply(next(upcoming)))

    def after_step(event: Event) -> None:
        if isinstance(event, StepFinished) and next(numbers) % 4 == 0:
            engine.core.steps.run_between_steps(change)

    engine.core.bus.subscribe(after_step)
    return lambda: len(made)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_tokens_are_those_without_speculation(
    folder: Path, device_name: str, expected: list[list[int]], config: list[dict[str, object]], depth: int
) -> None:
    """Something changes after every fourth step, many times within each stream."""
    with engine_on(folder, device_name, speculative_config=config, pipeline_depth=depth, max_num_seqs=5) as engine:
        num_changes = change_with_steps(engine, changes_of(config))
        found = generate(engine)
        statistics = engine.statistics()
    assert found == expected
    assert num_changes() > 50
    assert len(statistics.draft_tokens_per_position) == 4, "every number of drafts was verified"
    assert sum(statistics.accepted_tokens_per_position) > 5


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_off_is_off_for_those_that_run(
    folder: Path, device_name: str, expected: list[list[int]], config: list[dict[str, object]]
) -> None:
    """From the middle of each stream on nothing is verified; another change turns it on for the next ones."""
    with engine_on(folder, device_name, speculative_config=config) as engine:

        async def turn_off() -> None:
            await engine.core.engine.set_speculation(SpeculationChange(enabled=False))

        assert generate(engine, on_event=turn_off) == expected
        before = engine.statistics().draft_tokens_per_position
        assert generate(engine) == expected
        assert engine.statistics().draft_tokens_per_position == before
        engine.set_speculation(SpeculationChange(enabled=True))
        assert generate(engine) == expected
        assert sum(engine.statistics().draft_tokens_per_position) > sum(before) + 50


def test_a_captured_lookup_follows_its_parameters(folder: Path, device_name: str, expected: list[list[int]]) -> None:
    """Runs of 64 tokens never occur twice here, shorter ones do."""
    never = {**NGRAM, "prompt_lookup_min": 64, "prompt_lookup_max": 64}
    with engine_on(folder, device_name, speculative_config=never) as engine:
        assert generate(engine) == expected
        assert engine.statistics().draft_tokens_per_position == ()
        shorter = ProposerChange(parameters={"prompt_lookup_min": 1, "prompt_lookup_max": 3})
        engine.set_speculation(SpeculationChange(proposers=[shorter]))
        assert generate(engine) == expected
        assert sum(engine.statistics().draft_tokens_per_position) > 50
