"""What goes wrong inside one request stays there."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from server.preprocess import TextPrompt
from server.request import SamplingParams
from server.worker.logits import LogitsProcessor
from tests.fakes.engine_under_test import EngineUnderTest, Outcome, engine_on
from tests.fakes.scripted_proposer import ScriptedProposer
from tests.tiny_model import build_tiny_model

POISON = 77
K = 3
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("faults"), poison_token_id=POISON)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Clean ones."""
    rng = random.Random(0)
    return [[rng.randrange(80, 500) for _ in range(length)] for length in (3, 20, 33, 60)]


@pytest.fixture(scope="module")
def expected(folder: Path, device_name: str, prompts: list[list[int]]) -> list[list[int]]:
    """Their answers when nothing goes wrong."""
    with engine_on(folder, device_name) as engine:
        return [outcome.only.token_ids for outcome in engine.generate(prompts, GREEDY)]


@pytest.fixture(scope="module", params=[0, 1], ids=["depth-0", "depth-1"])
def engine(
    folder: Path,
    device_name: str,
    prompts: list[list[int]],
    expected: list[list[int]],
    request: pytest.FixtureRequest,
) -> Iterator[EngineUnderTest]:
    """A small pool, so that blocks go from one request to the next, and chunks of 16 tokens."""
    texts = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    with engine_on(
        folder,
        device_name,
        proposer=ScriptedProposer(K, texts, error_rate=0.1),
        pipeline_depth=request.param,
        max_model_len=128,
        kv_cache_memory_bytes=24 * 8192,
        max_num_batched_tokens=96,
        long_prefill_token_threshold=16,
        max_num_partial_prefills=4,
    ) as engine:
        yield engine
        engine.core.scheduler.check_integrity()


def run(
    engine: EngineUnderTest,
    prompts: list[list[int]],
    expected: list[list[int]],
    bad_prompt: list[int],
    bad_params: SamplingParams,
) -> Outcome:
    """A bad request among good ones, whose answers must not change. Returns: how the bad one ended."""
    outcomes = engine.generate([*prompts[:2], bad_prompt, *prompts[2:]], [GREEDY, GREEDY, bad_params, GREEDY, GREEDY])
    bad = outcomes.pop(2)
    assert [outcome.only.token_ids for outcome in outcomes] == expected
    assert bad.error is not None
    return bad


@pytest.mark.parametrize("place", [0, 7, 20, 39], ids=lambda place: f"token {place} of 40")
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(top_p=0.9, top_k=5), SamplingParams(seed=1)], ids=["greedy", "unseeded", "seeded"]
)
def test_nan_in_a_prompt(
    engine: EngineUnderTest, prompts: list[list[int]], expected: list[list[int]], place: int, params: SamplingParams
) -> None:
    """Twice, so that the freed blocks are used again, and never as anybody's prefix."""
    poisoned = [300 + place] * 40
    poisoned[place] = POISON
    for _ in range(2):
        before = engine.statistics().prefix_hit_tokens
        outcome = run(engine, prompts, expected, poisoned, params)
        assert "NaN" in str(outcome.error)
        assert outcome.choices[0].token_ids == []
        engine.generate(prompts, GREEDY)  # leaves their prefixes cached, so that what is counted next is the poisoned
    before = engine.statistics().prefix_hit_tokens
    assert engine.generate([poisoned], params)[0].error is not None
    assert engine.statistics().prefix_hit_tokens - before <= place // 16 * 16


def test_nan_after_a_generated_token(
    engine: EngineUnderTest, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """What came before it has been streamed."""
    params = SamplingParams(temperature=0, max_tokens=9, logit_bias={POISON: 100}, ignore_eos=True)
    outcome = run(engine, prompts, expected, [301, 302], params)
    assert outcome.choices[0].token_ids == [POISON]


def test_a_poisoned_draft_that_is_not_accepted_harms_nobody(
    folder: Path, device_name: str, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    texts = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]

    class Poisoner(ScriptedProposer):
        def _guess(self) -> int:
            return POISON

    proposer = Poisoner(K, texts, error_rate=0.3)
    for depth in (0, 1):
        with engine_on(folder, device_name, proposer=proposer, pipeline_depth=depth) as engine:
            outcomes = engine.generate(prompts, GREEDY)
            assert sum(engine.statistics().accepted_tokens_per_position) > 0
        assert [outcome.only.token_ids for outcome in outcomes] == expected


@pytest.mark.parametrize("others", [{"temperature": 0}, {"top_p": 0.5}, {"top_k": 2, "seed": 1}], ids=str)
def test_no_token_is_left(
    engine: EngineUnderTest, prompts: list[list[int]], expected: list[list[int]], others: dict[str, Any]
) -> None:
    allowed = engine.core.preprocessor.tokenize(TextPrompt("q"))
    params = SamplingParams(max_tokens=9, allowed_token_ids=allowed, bad_words=["q"], **others)
    outcome = run(engine, prompts, expected, [301, 302], params)
    assert "leave no token" in str(outcome.error)


def test_a_ban_that_only_a_rejected_draft_would_meet(folder: Path, device_name: str) -> None:
    """After Z everything is banned, but q is always chosen, whatever is drafted."""
    with engine_on(folder, device_name) as engine:
        (a,), (b,) = (engine.core.preprocessor.tokenize(TextPrompt(text)) for text in "Zq")
        params = SamplingParams(
            temperature=0,
            max_tokens=8,
            allowed_token_ids=[a, b],
            logit_bias={b: 100, a: -100},
            bad_words=["ZZ", "Zq"],
            ignore_eos=True,
        )
        plain = engine.generate([[5, 6]], params)[0].only.token_ids
    assert plain == [b] * 8
    with engine_on(folder, device_name, proposer=ScriptedProposer(2, [[5, 6] + [a] * 10, [5, 6, b, a, a]])) as engine:
        assert engine.generate([[5, 6]], params)[0].only.token_ids == plain
        assert sum(engine.statistics().draft_tokens_per_position) > 0


def test_an_exception_in_the_rules_of_one_request(
    engine: EngineUnderTest, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_rules = LogitsProcessor._apply_rules

    def fail_for_one(self: LogitsProcessor, logits: Tensor, slot: int, rules: Any) -> None:
        if torch.equal(rules.bias[99:100].cpu(), torch.tensor([42.0])):
            raise ArithmeticError("a rule is broken")
        apply_rules(self, logits, slot, rules)

    monkeypatch.setattr(LogitsProcessor, "_apply_rules", fail_for_one)
    params = SamplingParams(max_tokens=9, logit_bias={99: 42.0})
    outcome = run(engine, prompts, expected, [301, 302], params)
    assert "a rule is broken" in str(outcome.error)
