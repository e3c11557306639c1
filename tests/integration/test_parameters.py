"""Every sampling parameter means the same with speculation as without it.

Greedy and seeded answers must be equal id for id; the drafts are the right continuation with
errors, so that parameters act on accepted, rejected and bonus tokens alike.
"""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from server.guidance.params import StructuredOutputsParams
from server.request import SamplingParams
from tests.fakes.engine_under_test import Answer, engine_on
from tests.fakes.proposer_settings import build_models, config_of, with_models
from tests.fakes.scripted_proposer import ScriptedProposer
from tests.tiny_model import build_tiny_model

NUM_TOKENS = 24
K = 4
PARAMETERS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.3},
    "high temperature": {"temperature": 1e38},
    "low temperature": {"temperature": 1e-4},
    "top_k": {"top_k": 3},
    "top_k 1": {"top_k": 1},
    "top_k above the vocabulary": {"top_k": 10**6},
    "top_p": {"top_p": 0.5},
    "tiny top_p": {"top_p": 1e-9},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "repetition_penalty": {"repetition_penalty": 1.9},
    "reward for repetition": {"repetition_penalty": 0.4},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "negative frequency_penalty": {"frequency_penalty": -2.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "logit_bias": {"logit_bias": {5: 100.0, 6: 99.5, 7: -100.0}},
    "bad_words": {"bad_words": ["the", " dog", "e", "n", "fox jumps"], "allowed_token_ids": range(100)},
    "allowed_token_ids": {"allowed_token_ids": [9, 10, 11, 12]},
    "min_tokens": {"min_tokens": 10, "stop_token_ids": range(3, 200)},
    "n": {"n": 3, "temperature": 1.2},
    "stop": {"stop": ["a", "e", "t"]},
    "stop_token_ids": {"stop_token_ids": range(3, 40)},
    "logprobs": {"logprobs": 3},
    "structured_outputs": {"structured_outputs": StructuredOutputsParams(regex="[a-m ]{4,40}"), "ignore_eos": False},
    "everything": {
        "temperature": 1.4,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {8: 4.0},
        "bad_words": ["q"],
        "min_tokens": 5,
        "stop_token_ids": [8, 9],
        "n": 2,
        "logprobs": 1,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("parameters"))


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Each parameter greedy and seeded, on prompts of its own."""
    rng = random.Random(0)
    prompts, params = [], []
    for number, (values, base) in enumerate(itertools.product(PARAMETERS.values(), ({"temperature": 0}, {"seed": 3}))):
        prompts.append([number + 3, *(rng.randrange(3, 400) for _ in range(rng.randint(1, 30)))])
        merged = {**values, **base, "max_tokens": NUM_TOKENS}
        if base == {"seed": 3}:
            merged["temperature"] = values.get("temperature", 1.0)
        merged.setdefault("ignore_eos", True)
        params.append(SamplingParams(**merged))
    return prompts, params


@pytest.fixture(scope="module")
def expected(folder: Path, device_name: str) -> list[list[Answer]]:
    """The choices of every request, without speculation."""
    prompts, params = requests()
    with engine_on(folder, device_name) as engine:
        return [outcome.choices for outcome in engine.generate(prompts, params)]


NETWORKS = ("draft_model", "eagle", "eagle3", "layer_skip", "medusa")
CONFIGS: dict[str, Any] = {
    "ngram": config_of("ngram", K),
    "suffix": config_of("suffix", K),
    "ngram, suffix": [config_of("ngram", 2), config_of("suffix", K)],
    "block": config_of("ngram", K) | {"rejection_sample_method": "block"},
    **{method: config_of(method, 3) for method in NETWORKS},
    "eagle3, block": config_of("eagle3", K) | {"rejection_sample_method": "block"},
    "ngram, eagle3": [config_of("ngram", 2), config_of("eagle3", K)],
}
CELLS = [(0, "scripted"), (1, "scripted"), *itertools.product((1, 0), CONFIGS)]
QUICK = [cell for cell in CELLS if cell[0] == 1 or cell[1] in ("scripted", "block")]
"""Depths and proposers; the others are for the full tier."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return build_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("depth", "config"), [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.full) for cell in CELLS]
)
def test_answers_equal_those_without_speculation(
    folder: Path, models: dict[str, str], expected: list[list[Answer]], device_name: str, depth: int, config: str
) -> None:
    prompts, params = requests()
    texts = [prompt + choice.token_ids for prompt, choices in zip(prompts, expected, strict=True) for choice in choices]
    is_scripted = config == "scripted"
    proposer = ScriptedProposer(K, texts, error_rate=0.2) if is_scripted else None
    settings: dict[str, Any] = {} if is_scripted else {"speculative_config": with_models(CONFIGS[config], models)}
    with engine_on(folder, device_name, proposer=proposer, pipeline_depth=depth, **settings) as engine:
        outcomes = engine.generate(prompts, params, arrivals=random.Random(depth))
        statistics = engine.statistics()
    names = [name for name in PARAMETERS for _ in ("greedy", "seeded")]
    for name, choices, outcome in zip(names, expected, outcomes, strict=True):
        assert outcome.error is None, name
        assert [choice.token_ids for choice in outcome.choices] == [choice.token_ids for choice in choices], name
        assert [choice.text for choice in outcome.choices] == [choice.text for choice in choices], name
        assert [choice.end.stop_reason for choice in outcome.choices] == [c.end.stop_reason for c in choices], name
    accepted = statistics.accepted_tokens_per_position
    assert min(accepted) > 20 if is_scripted else sum(accepted) > 0


def test_each_parameter_shows_in_the_answers(expected: list[list[Answer]]) -> None:
    """Equality with speculation is worth little if the parameter did nothing."""
    names = list(PARAMETERS)

    def ids(name: str, kind: int = 0) -> list[int]:
        return expected[2 * names.index(name) + kind][0].token_ids

    for kind in (0, 1):
        assert set(ids("allowed_token_ids", kind)) <= {9, 10, 11, 12}
        assert set(ids("bad_words", kind)) <= set(range(100))
        assert 5 in ids("logit_bias", kind)
        assert set(ids("logit_bias", kind)) <= {5, 6}
        assert len(ids("min_tokens", kind)) > 10
        assert len(set(ids("presence_penalty", kind))) > len(set(ids("negative frequency_penalty", kind)))
    assert len({tuple(choice.token_ids) for choice in expected[2 * names.index("n") + 1]}) == 3
    assert ids("top_k 1", 1) != ids("top_k", 1)


def test_one_choice_only_is_greedy(folder: Path, device_name: str) -> None:
    """Whatever leaves a single token to choose from gives the greedy answer, drafts or not."""
    prompt = [71, 301, 12]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    narrow: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-4}]
    params = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **values) for values in narrow]
    with engine_on(folder, device_name) as engine:
        token_ids = engine.generate([prompt], greedy)[0].only.token_ids
    proposer = ScriptedProposer(K, [prompt + token_ids], error_rate=0.2)
    with engine_on(folder, device_name, proposer=proposer, pipeline_depth=1) as engine:
        outcomes = engine.generate([prompt] * len(params), params)
    assert [outcome.only.token_ids for outcome in outcomes] == [token_ids] * len(params)
