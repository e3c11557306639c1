"""Log probabilities against a plain forward of transformers."""

import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from server.engine.protocol import PositionLogprobs
from server.request import SamplingParams
from tests.fakes.engine_under_test import Answer, engine_on, ngram
from tests.fakes.reference_model import Reference
from tests.fakes.scripted_proposer import ScriptedProposer
from tests.tiny_model import build_tiny_model

TOLERANCE = 1e-4
NUM_TOP = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("logprobs"))


@pytest.fixture(scope="module")
def reference(folder: Path, device_name: str) -> Reference:
    return Reference(folder, device_name)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in (2, 17, 40, 75, 90)]


def check_position(got: PositionLogprobs, logprobs: Tensor, token_id: int, num_top: int) -> None:
    """One position against [vocab] log probabilities."""
    assert got.chosen.token_id == token_id
    assert got.chosen.logprob == pytest.approx(float(logprobs[token_id]), abs=TOLERANCE)
    rank = int((logprobs > logprobs[token_id]).sum()) + 1
    near = int(((logprobs - logprobs[token_id]).abs() < TOLERANCE).sum()) - 1
    assert abs(got.chosen.rank - rank) <= near
    assert [entry.rank for entry in got.top] == list(range(1, num_top + 1))
    best = logprobs.topk(num_top).values.tolist()
    assert [entry.logprob for entry in got.top] == pytest.approx(best, abs=TOLERANCE)
    for entry in got.top:
        assert entry.logprob == pytest.approx(float(logprobs[entry.token_id]), abs=TOLERANCE)


def check_answer(reference: Reference, prompt: list[int], answer: Answer) -> None:
    """Every token of an answer has its log probabilities, and no others are there."""
    expected = reference.logits(prompt + answer.token_ids).log_softmax(-1)
    assert len(answer.logprobs) == len(answer.token_ids)
    for i, got in enumerate(answer.logprobs):
        check_position(got, expected[len(prompt) - 1 + i], answer.token_ids[i], NUM_TOP)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_generated_tokens_are_of_the_raw_distribution(
    folder: Path, reference: Reference, prompts: list[list[int]], device_name: str, temperature: float, depth: int
) -> None:
    """Whatever the sampling parameters do, and with drafts; a neighbour asks for none, one for 0."""
    texts = [prompt + reference.greedy(prompt, 24).token_ids for prompt in prompts]
    proposer = ScriptedProposer(4, texts, error_rate=0.2)
    asks = [NUM_TOP, NUM_TOP, None, 0, NUM_TOP]
    params = [
        SamplingParams(
            temperature=temperature,
            top_k=9,
            top_p=0.9,
            frequency_penalty=0.3,
            logit_bias={7: 3.0},
            logprobs=ask,
            max_tokens=20,
            ignore_eos=True,
        )
        for ask in asks
    ]
    with engine_on(folder, device_name, proposer=proposer, pipeline_depth=depth) as engine:
        outcomes = engine.generate(prompts, params)
        assert sum(engine.statistics().draft_tokens_per_position) > 0
    for prompt, outcome, ask in zip(prompts, outcomes, asks, strict=True):
        if ask == NUM_TOP:
            check_answer(reference, prompt, outcome.only)
        elif ask == 0:
            assert [len(position.top) for position in outcome.only.logprobs] == [0] * 20
        else:
            assert outcome.only.logprobs == []


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("k", [0, 3])
def test_prompt_tokens_chunked_and_with_their_prefix_cached(
    folder: Path, reference: Reference, prompts: list[list[int]], device_name: str, k: int, depth: int
) -> None:
    with engine_on(
        folder,
        device_name,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=20,
        max_num_partial_prefills=2,
        pipeline_depth=depth,
        speculative_config=ngram(k) if k else None,
    ) as engine:
        plain = SamplingParams(temperature=0, max_tokens=4)
        engine.generate(prompts, plain)
        params = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=NUM_TOP, logprobs=NUM_TOP, ignore_eos=True)
        outcomes = engine.generate(prompts, params)
        assert [outcome.num_cached_tokens for outcome in outcomes] == [0] * len(prompts)
        assert engine.generate(prompts, plain)[-1].num_cached_tokens > 0
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        expected = reference.logits(prompt).log_softmax(-1)
        assert len(outcome.prompt_logprobs) == len(prompt) - 1
        for i, got in enumerate(outcome.prompt_logprobs):
            check_position(got, expected[i], prompt[i + 1], NUM_TOP)
        check_answer(reference, prompt, outcome.only)


def test_prompt_logprobs_of_several_choices_come_once(
    folder: Path, reference: Reference, prompts: list[list[int]], device_name: str
) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=5, prompt_logprobs=0, logprobs=NUM_TOP, ignore_eos=True)
    with engine_on(folder, device_name, speculative_config=ngram(3)) as engine:
        outcomes = engine.generate(prompts, params)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        expected = reference.logits(prompt).log_softmax(-1)
        assert len(outcome.prompt_logprobs) == len(prompt) - 1
        for i, got in enumerate(outcome.prompt_logprobs):
            check_position(got, expected[i], prompt[i + 1], 0)
        for choice in outcome.choices:
            check_answer(reference, prompt, choice)


def test_prompt_logprobs_of_one_token_are_none(folder: Path, device_name: str) -> None:
    with engine_on(folder, device_name) as engine:
        outcome = engine.generate([[5]], SamplingParams(prompt_logprobs=2, max_tokens=2))[0]
    assert outcome.error is None
    assert outcome.prompt_logprobs == []


def test_preempted_prompts_report_each_position_once(
    folder: Path, reference: Reference, prompts: list[list[int]], device_name: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, prompt_logprobs=1, logprobs=NUM_TOP, ignore_eos=True)
    with engine_on(
        folder,
        device_name,
        max_model_len=144,
        kv_cache_memory_bytes=11 * 8192,
        watermark=0.0,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=16,
        speculative_config=ngram(3),
    ) as engine:
        outcomes = engine.generate(prompts, params)
        assert engine.statistics().num_preemptions > 0
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert [position.chosen.token_id for position in outcome.prompt_logprobs] == prompt[1:]
        check_answer(reference, prompt, outcome.only)


def test_more_than_the_vocabulary_and_impossible_tokens(tmp_path: Path, device_name: str) -> None:
    """A request for more than there is gets all; a masked token keeps its raw probability."""
    folder = build_tiny_model(tmp_path, vocab_size=300)
    params = SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=[17], logprobs=64, ignore_eos=True)
    with engine_on(folder, device_name) as engine:
        answer = engine.generate([[5, 6]], params)[0].only
    assert answer.token_ids == [17, 17, 17]
    assert all(math.isfinite(position.chosen.logprob) for position in answer.logprobs)
    assert all(len(position.top) == 64 for position in answer.logprobs)
    expected = Reference(folder, device_name).logits([5, 6, 17]).log_softmax(-1)
    torch.testing.assert_close(answer.logprobs[1].chosen.logprob, float(expected[2, 17]), atol=TOLERANCE, rtol=0)
