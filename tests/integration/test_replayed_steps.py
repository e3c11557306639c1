"""Captured steps make the tokens that eager ones do, whatever drafts: on the CPU, with segments that are run again."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from server.guidance.params import StructuredOutputsParams
from server.request import SamplingParams
from server.worker.token_masks import StandingMasks
from tests.fakes.engine_under_test import Outcome, engine_on
from tests.fakes.proposer_settings import build_models, config_of, with_models
from tests.fakes.twin_kernels import ReplayedGraphs, as_on_cuda
from tests.tiny_model import build_tiny_model

K = 3
NUM_TOKENS = 24
PARAMETERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 7},
    {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
)
CONFIGS: dict[str, list[dict[str, object]]] = {
    "none": [],
    "ngram": [config_of("ngram", K)],
    "draft model": [config_of("draft_model", K)],
    "greedy drafts": [{**config_of("draft_model", K), "draft_sample_method": "greedy"}],
    "eagle": [config_of("eagle", K)],
    "eagle3": [config_of("eagle3", K)],
    "medusa": [config_of("medusa", K)],
    "layer skip": [config_of("layer_skip", K)],
    "ngram, eagle3": [config_of("ngram", K), config_of("eagle3", K)],
    "suffix": [config_of("suffix", K)],
    "suffix, draft model": [config_of("suffix", K), config_of("draft_model", K)],
}
QUICK = ("none", "ngram, eagle3", "draft model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("replayed"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return build_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def graphs() -> Iterator[type[ReplayedGraphs]]:
    with as_on_cuda() as replayed:
        yield replayed


def requests(extra: Sequence[dict[str, Any]] = ()) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of many lengths, some of which repeat themselves."""
    rng = random.Random(5)
    kinds = (*PARAMETERS, *extra)
    prompts = [[rng.randrange(3, 400) for _ in range(rng.randint(1, 12))] * rng.randint(1, 4) for _ in range(13)]
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    return prompts, [SamplingParams(**{**options, **kinds[i % len(kinds)]}) for i in range(len(prompts))]


def tokens(outcomes: Sequence[Outcome]) -> list[list[int]]:
    return [outcome.only.token_ids for outcome in outcomes]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with engine_on(folder, "cpu", enforce_eager=True) as engine:
        return tokens(engine.generate(*requests()))


@pytest.mark.parametrize(
    "config", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CONFIGS]
)
def test_tokens_are_those_of_eager_steps(
    folder: Path, models: dict[str, str], expected: list[list[int]], graphs: type[ReplayedGraphs], config: str
) -> None:
    """In padded batches, in slots that are used again, with drafts that are wanted by some requests only."""
    members = with_models(CONFIGS[config], models)
    settings: dict[str, Any] = {"speculative_config": members or None, "max_num_seqs": 5, "enforce_eager": False}
    with engine_on(folder, "cpu", **settings) as engine:
        assert tokens(engine.generate(*requests())) == expected
        assert tokens(engine.generate(*requests(), num_drafts=0 if members else None)) == expected
        statistics = engine.statistics()
    assert sum(statistics.draft_tokens_per_position) > 0 or not members
    has_network = any(member["method"] not in ("ngram", "suffix") for member in members)
    assert graphs.num_replays[True] > 5 or not members or config == "suffix"
    assert graphs.num_replays[False] > 5 or not (has_network or not members)


def test_captured_steps_and_others_by_turns(folder: Path, models: dict[str, str], graphs: type[ReplayedGraphs]) -> None:
    """Rows with rules of their own and those that report have their second segment run eagerly."""
    extra: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.9, "seed": 4, "logit_bias": {7: 3.0}, "min_tokens": 4, "ignore_eos": False},
        {
            "temperature": 0.7,
            "seed": 5,
            "structured_outputs": StructuredOutputsParams(regex="[a-m ]{4,40}"),
            "ignore_eos": False,
        },
    ]
    with engine_on(folder, "cpu", enforce_eager=True) as engine:
        plain = tokens(engine.generate(*requests(extra)))
    settings: dict[str, Any] = {"max_num_seqs": 3, "enforce_eager": False}
    members = with_models([config_of("ngram", K), config_of("eagle3", K)], models)
    with engine_on(folder, "cpu", speculative_config=members, **settings) as engine:
        for arrivals in (None, random.Random(1)):
            assert tokens(engine.generate(*requests(extra), arrivals=arrivals)) == plain
    assert graphs.num_replays[True] > 5


GUIDED: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "structured_outputs": StructuredOutputsParams(regex="[a-m ]{4,40}"), "ignore_eos": False},
    {
        "temperature": 0.7,
        "seed": 5,
        "structured_outputs": StructuredOutputsParams(regex="(the|dog)( (quick|brown) fox){1,4}[.!]"),
        "ignore_eos": False,
    },
)


@pytest.mark.parametrize("config", ["none", "ngram", "suffix", "ngram, eagle3"])
def test_masks_reach_captured_steps(
    folder: Path, models: dict[str, str], graphs: type[ReplayedGraphs], config: str
) -> None:
    """Of some rows, of none in the next step, and of other rows in the one after."""
    with engine_on(folder, "cpu", enforce_eager=True) as engine:
        plain = tokens(engine.generate(*requests(GUIDED)))
    members = with_models(CONFIGS[config], models)
    settings: dict[str, Any] = {"speculative_config": members or None, "max_num_seqs": 5, "enforce_eager": False}
    with (
        patch.object(StandingMasks, "put", autospec=True, side_effect=StandingMasks.put) as put,
        engine_on(folder, "cpu", **settings) as engine,
    ):
        for arrivals in (None, random.Random(1)):
            assert tokens(engine.generate(*requests(GUIDED), arrivals=arrivals)) == plain
    is_guided = [call.args[1] is not None for call in put.call_args_list]
    assert sum(is_guided) > 20
    assert not all(is_guided)
    assert sum(graphs.num_replays.values()) == len(is_guided)
