"""What every proposer must keep to, those of other distributions included."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.base import HostProposer, ProposeInput, Proposer, SequenceText, TargetView
from proposers.registry import known_proposers
from server.request import SamplingParams
from tests.fakes.engine_under_test import Answer, EngineUnderTest, engine_on
from tests.fakes.proposer_settings import build_models, config_of, with_models
from tests.fakes.speculative import speculative_config
from tests.tiny_model import build_tiny_model

K = 3
VOCAB = 512
EXAMPLES = ("tests.fakes.example_proposers:RepeatConfig", "tests.fakes.example_proposers:PeriodConfig")
SINGLES: dict[str, Any] = {method: config_of(method, K) for method in (*known_proposers(), *EXAMPLES)}
LISTS: dict[str, Any] = {
    "suffix, ngram": [config_of("suffix", 5), config_of("ngram", 2)],
    "ngram, suffix": [config_of("ngram", 2), config_of("suffix", K)],
    "ngram, draft model, repeat": [config_of("ngram", 2), config_of("draft_model", K), config_of(EXAMPLES[0], 1)],
    "layer skip, draft model": [config_of("layer_skip", 1), config_of("draft_model", 4)],
    "ngram, eagle3": [config_of("ngram", 2), config_of("eagle3", 4)],
    "medusa, eagle": [config_of("medusa", 1), {**config_of("eagle", K), "draft_sample_method": "greedy"}],
    "repeat, ngram, period": [config_of(EXAMPLES[0], 1), config_of("ngram", 4), config_of(EXAMPLES[1], K)],
}
CONFIGS = SINGLES | LISTS
ALONE = ("ngram", "suffix", *EXAMPLES)
"""Methods that need no target at hand."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("contract"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return build_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=list(CONFIGS.values()), ids=list(CONFIGS))
def config(request: pytest.FixtureRequest, models: dict[str, str]) -> Any:
    """Each as it is given, its models being folders."""
    return with_models(request.param, models)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that repeat themselves, greedy and seeded by turns, some with two choices or a stop token."""
    rng = random.Random(3)
    prompts, params = [], []
    for number in range(14):
        piece = [rng.randrange(3, 400) for _ in range(rng.randint(1, 6))]
        prompts.append([number + 3, *piece * rng.randint(1, 4)])
        choice: dict[str, Any] = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number}
        rest = ({"n": 2}, {"stop_token_ids": list(range(60, 90))}, {}, {"max_tokens": 2})[number % 4]
        params.append(SamplingParams(**{"max_tokens": 30, "ignore_eos": True, **choice, **rest}))
    return prompts, params


def generate(engine: EngineUnderTest, **options: Any) -> list[Answer]:
    """All choices of all requests."""
    return [choice for outcome in engine.generate(*requests(), **options) for choice in outcome.choices]


@pytest.fixture(scope="module")
def expected(folder: Path, device_name: str) -> list[list[int]]:
    """What is generated without speculation."""
    with engine_on(folder, device_name) as engine:
        return [choice.token_ids for choice in generate(engine)]


@pytest.fixture(params=ALONE)
def proposer(request: pytest.FixtureRequest, device_name: str) -> Proposer | HostProposer:
    """Each that drafts from token ids alone."""
    return (
        speculative_config(SINGLES[request.param])
        .proposers[0]
        .build(TargetView(VOCAB, torch.device(device_name), num_slots=4))
    )


@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_are_those_without_speculation(
    folder: Path, device_name: str, expected: list[list[int]], config: Any, depth: int
) -> None:
    """Twice, with other neighbours and in slots that were used before; and the counters add up."""
    settings = {"speculative_config": config, "pipeline_depth": depth, "max_num_seqs": 5}
    with engine_on(folder, device_name, **settings) as engine:
        choices = [*generate(engine), *generate(engine, arrivals=random.Random(depth))]
        statistics = engine.statistics()
    assert [choice.token_ids for choice in choices] == expected * 2
    drafted, accepted = statistics.draft_tokens_per_position, statistics.accepted_tokens_per_position
    stats = [choice.end.speculation for choice in choices]
    assert sum(drafted) == sum(each.num_draft_tokens for each in stats) > 0
    assert sum(accepted) == sum(each.num_accepted_draft_tokens for each in stats)
    assert drafted[0] == sum(each.num_spec_steps for each in stats)
    assert all(a <= d for a, d in zip(accepted, drafted, strict=False))
    for position, count in enumerate(accepted):
        assert count == sum(sum(each.acceptance_histogram[position + 1 :]) for each in stats)
    for counts in (drafted, accepted):
        assert list(counts) == sorted(counts, reverse=True)


def test_a_request_bounds_its_drafts(folder: Path, device_name: str, expected: list[list[int]], config: Any) -> None:
    with engine_on(folder, device_name, speculative_config=config) as engine:
        assert [choice.token_ids for choice in generate(engine, num_drafts=0)] == expected
        assert engine.statistics().draft_tokens_per_position == ()
        assert [choice.token_ids for choice in generate(engine, num_drafts=1)] == expected
        assert len(engine.statistics().draft_tokens_per_position) == 1


def test_drafts_have_the_form_they_must(proposer: Proposer | HostProposer, device_name: str) -> None:
    rng = random.Random(1)
    texts = [[5, 6, 7] * 4, [9] * 7, [rng.randrange(VOCAB) for _ in range(12)], [3]]
    most = [K, 1, 0, K]
    assert proposer.num_speculative_tokens == K
    if isinstance(proposer, HostProposer):
        for slot, text in enumerate(texts):
            proposer.start(slot, SequenceText(tuple(text[:1]), 1, ""))
            proposer.extend(slot, text[1:])
        found = [list(proposer.propose(slot, most[slot])) for slot in range(len(texts))]
    else:
        found = _from_device(proposer, texts, most, device_name)
    assert any(found)
    for drafts, limit in zip(found, most, strict=True):
        assert len(drafts) <= limit
        assert all(0 <= token_id < VOCAB for token_id in drafts)


def _from_device(proposer: Proposer, texts: list[list[int]], most: list[int], device: str) -> list[list[int]]:
    width = max(map(len, texts))
    draft = proposer.propose(
        ProposeInput(
            torch.tensor([text + [0] * (width - len(text)) for text in texts], dtype=torch.int32, device=device),
            torch.arange(len(texts), device=device),
            torch.tensor([len(text) for text in texts], device=device),
            torch.tensor(most, dtype=torch.int32, device=device),
            max_num_tokens=width,
        )
    )
    assert (draft.ids.shape, draft.ids.dtype, draft.counts.dtype) == ((len(texts), K), torch.int32, torch.int32)
    assert (draft.logits is None) == (proposer.vocabulary is None)
    if draft.logits is not None and proposer.vocabulary is not None:
        assert draft.logits.shape == (len(texts), K, proposer.vocabulary.size)
    counts = draft.counts.tolist()
    for ids, count in zip(draft.ids.tolist(), counts, strict=True):
        assert ids[count:] == [-1] * (K - count)
    return [ids[:count] for ids, count in zip(draft.ids.tolist(), counts, strict=True)]
