"""A seed decides every token: not the batch, the drafts, the pipeline or a preemption."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.request import SamplingParams
from tests.fakes.engine_under_test import EngineUnderTest, engine_on
from tests.fakes.scripted_proposer import ScriptedProposer
from tests.tiny_model import build_tiny_model

PROMPT = [71, 301, 12, 300, 290, 71, 301, 12]
NUM_TOKENS = 40
K = 5
SEEDED = SamplingParams(seed=-7, temperature=0.9, top_p=0.95, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("seeds"))


@pytest.fixture(scope="module")
def expected(folder: Path, device_name: str) -> list[int]:
    """The answer alone, without speculation."""
    with engine_on(folder, device_name, pipeline_depth=0) as engine:
        return engine.generate([PROMPT], SEEDED)[0].only.token_ids


@pytest.fixture(scope="module", params=[0, 1], ids=["depth-0", "depth-1"])
def engine(
    folder: Path, device_name: str, expected: list[int], request: pytest.FixtureRequest
) -> Iterator[EngineUnderTest]:
    """An engine whose drafts are mostly what the seed leads to."""
    proposer = ScriptedProposer(K, [PROMPT + expected], error_rate=0.2)
    with engine_on(folder, device_name, proposer=proposer, pipeline_depth=request.param) as engine:
        yield engine
        assert sum(engine.statistics().accepted_tokens_per_position) > NUM_TOKENS


@pytest.mark.parametrize("k", [0, 3, K])
def test_alone_and_among_neighbours(engine: EngineUnderTest, expected: list[int], k: int) -> None:
    assert engine.generate([PROMPT], SEEDED, num_drafts=k)[0].only.token_ids == expected
    rng = random.Random(k)
    neighbours = [[rng.randrange(3, 500) for _ in range(rng.randint(1, 50))] for _ in range(8)]
    theirs = [
        SamplingParams(temperature=1.3, top_p=rng.choice([0.5, 1.0]), top_k=rng.choice([0, 3]), max_tokens=30)
        for _ in neighbours
    ]
    outcomes = engine.generate([*neighbours, PROMPT], [*theirs, SEEDED], num_drafts=k, arrivals=rng)
    assert outcomes[-1].only.token_ids == expected


def test_after_preemption(folder: Path, device_name: str, expected: list[int]) -> None:
    proposer = ScriptedProposer(K, [PROMPT + expected], error_rate=0.2)
    with engine_on(
        folder,
        device_name,
        proposer=proposer,
        max_model_len=64,
        kv_cache_memory_bytes=7 * 8192,
        watermark=0.0,
        enable_prefix_caching=False,
    ) as engine:
        outcomes = engine.generate([PROMPT] * 6, SEEDED)
        assert engine.statistics().num_preemptions > 0
    assert [outcome.only.token_ids for outcome in outcomes] == [expected] * 6


def test_choices_and_seeds_and_unseeded_requests_differ(engine: EngineUnderTest, expected: list[int]) -> None:
    def answers(**changes: object) -> list[tuple[int, ...]]:
        values = {"temperature": 0.9, "top_p": 0.95, "max_tokens": NUM_TOKENS, "ignore_eos": True, **changes}
        outcomes = engine.generate([PROMPT, PROMPT], SamplingParams(**values))  # type: ignore[arg-type]
        return [tuple(choice.token_ids) for outcome in outcomes for choice in outcome.choices]

    choices = answers(n=4, seed=-7)
    assert choices[:4] == choices[4:]
    assert len(set(choices)) == 4
    assert list(choices[0]) == expected
    others = [answers(seed=seed)[0] for seed in (0, 1, -(2**63), 2**63 - 1)]
    assert len({*choices, *others}) == 8
    assert len(set(answers(n=3))) == 6
