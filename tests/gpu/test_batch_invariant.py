"""`--batch-invariant`: in bfloat16, a request's tokens and their log probabilities have the same bits in any batch."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from server.request import SamplingParams
from tests.fakes.engine_under_test import EngineUnderTest, engine_on
from tests.fakes.scripted_proposer import ScriptedProposer
from tests.tiny_model import write_tokenizer

pytestmark = pytest.mark.gpu

NUM_TOKENS = 24
NUM_PROMPTS = 64
BATCHES = (1, 2, 3, 7, 16, 33, 64)
ALONE = 8
"""Prompts that are answered alone as well."""

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
PLAIN = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
"""Without log probabilities both of a step's segments are replayed."""

Answer = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for sums to be split, and with weights so large that a bit's difference soon shows in the tokens."""
    folder = tmp_path_factory.mktemp("invariant")
    write_tokenizer(folder, 2048)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).bfloat16()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of 1 to 900 tokens: below and beyond a span of attention."""
    rng = random.Random(1)
    lengths = [1, 900, 513, 512, 40, 5, 64, 129, *(rng.randint(1, 200) for _ in range(NUM_PROMPTS - ALONE))]
    return [[rng.randrange(3, 300) for _ in range(-(-length // 3))] * 3 for length in lengths]


def settings(**changes: Any) -> dict[str, Any]:
    fixed = {
        "dtype": "bfloat16",
        "batch_invariant": True,
        "enforce_eager": False,
        "compile": "auto",
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 256 << 20,
        "max_model_len": 1024,
    }
    return {**fixed, **changes}


def answer(engine: EngineUnderTest, prompts: list[list[int]], sampling: SamplingParams) -> list[Answer]:
    return [
        (outcome.only.token_ids, [position.chosen.logprob for position in outcome.only.logprobs])
        for outcome in engine.generate(prompts, sampling)
    ]


def test_alone_and_in_batches(folder: Path, prompts: list[list[int]]) -> None:
    with engine_on(folder, "cuda", **settings()) as engine:
        for sampling in (GREEDY, SEEDED, PLAIN):
            alone = [answer(engine, [prompt], sampling)[0] for prompt in prompts[:ALONE]]
            assert len({tuple(ids) for ids, _ in alone}) == ALONE
            for size in BATCHES:
                found = answer(engine, prompts[:size], sampling)[:ALONE]
                assert found == alone[:size], f"in a batch of {size}"


def test_however_they_are_computed(folder: Path, prompts: list[list[int]]) -> None:
    """Prompts in chunks beside decoding rows, and verification of drafts."""
    prompts = prompts[:ALONE]
    with engine_on(folder, "cuda", **settings()) as engine:
        expected = answer(engine, prompts, GREEDY)
    with engine_on(folder, "cuda", **settings(max_num_batched_tokens=96, max_num_partial_prefills=4)) as engine:
        assert answer(engine, prompts, GREEDY) == expected
    texts = [prompt + ids for prompt, (ids, _) in zip(prompts, expected, strict=True)]
    proposer = ScriptedProposer(3, texts, error_rate=0.3)
    with engine_on(folder, "cuda", proposer=proposer, **settings()) as engine:
        assert answer(engine, prompts, GREEDY) == expected
        assert sum(engine.statistics().accepted_tokens_per_position) > 0
