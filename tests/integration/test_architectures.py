"""Other models than Llama: what they ask of attention and head, against transformers' own answers."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from server.request import SamplingParams
from tests.fakes.engine_under_test import engine_on, ngram
from tests.fakes.reference_model import ForkCounter, Reference
from tests.tiny_model import build_tiny_model, write_tokenizer

VOCAB = 400
LIMIT = 96
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LIMIT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
WITHOUT_HEAD_DIM = {key: value for key, value in TINY.items() if key != "head_dim"}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "sliding window": MistralConfig(**TINY, sliding_window=20),
    "window, soft caps and a scale of its own": Gemma2Config(
        **TINY,
        sliding_window=20,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=40,
    ),
    "window in some layers": Qwen2Config(
        **WITHOUT_HEAD_DIM, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "norms of queries and keys": Qwen3Config(**TINY),
    "parallel residual, partial rotation": GPTNeoXConfig(**{**WITHOUT_HEAD_DIM, "num_key_value_heads": 4}),
    "learned positions": GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=LIMIT, bos_token_id=1, eos_token_id=2
    ),
    "biases": PhiConfig(**WITHOUT_HEAD_DIM),
    "scaled logits": CohereConfig(**WITHOUT_HEAD_DIM, logit_scale=0.5),
    "multipliers": GraniteConfig(**WITHOUT_HEAD_DIM, logits_scaling=4.0, attention_multiplier=0.2),
    "sinks and experts": GptOssConfig(**TINY, sliding_window=20, num_local_experts=4, num_experts_per_tok=2),
}


def save(config: PreTrainedConfig, folder: Path) -> Path:
    """A random model whose steps depend on their context, with a tokenizer."""
    write_tokenizer(folder, VOCAB)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5)
                elif "norm" not in name and "ln_" not in name:
                    parameter.normal_()  # biases and sinks, which start as zeros
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_answers_equal_transformers_own(tmp_path: Path, device_name: str, name: str) -> None:
    """Prompts shorter and longer than the window, one that leaves a single token; chunks, drafts and depth 1."""
    folder = save(ARCHITECTURES[name], tmp_path)
    reference = Reference(folder, device_name)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 19, 45, 70, LIMIT - 1)]
    prompts.append(prompts[1][:8] * 6)
    answers = [reference.greedy(prompt, min(24, LIMIT - len(prompt))) for prompt in prompts]
    forks = ForkCounter()
    with engine_on(
        folder, device_name, max_num_batched_tokens=64, pipeline_depth=1, speculative_config=ngram(3)
    ) as engine:
        outcomes = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        assert sum(engine.statistics().draft_tokens_per_position) > 0
    for expected, outcome in zip(answers, outcomes, strict=True):
        forks.check(expected, outcome.only.token_ids)
    assert forks.num_forks == 0


@pytest.mark.parametrize("name", ["window, soft caps and a scale of its own", "norms of queries and keys"])
def test_bfloat16_answers_are_close(tmp_path: Path, device_name: str, name: str) -> None:
    """Half precision may take other tokens, but scores what it took as transformers does."""
    folder = save(ARCHITECTURES[name], tmp_path)
    reference = Reference(folder, device_name, torch.bfloat16)
    prompt = [random.Random(1).randrange(3, VOCAB) for _ in range(30)]
    with engine_on(folder, device_name, dtype="bfloat16", speculative_config=ngram(3)) as engine:
        params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True)
        answer = engine.generate([prompt], params)[0].only
    logprobs = reference.logits(prompt + answer.token_ids).log_softmax(-1)
    for i, position in enumerate(answer.logprobs):
        expected = float(logprobs[len(prompt) - 1 + i, position.chosen.token_id])
        assert position.chosen.logprob == pytest.approx(expected, abs=0.2)


@pytest.mark.parametrize("window", [2, 16, 33])
def test_windows_of_a_block_and_of_no_whole_blocks(tmp_path: Path, device_name: str, window: int) -> None:
    folder = build_tiny_model(tmp_path, sliding_window=window)
    reference = Reference(folder, device_name)
    rng = random.Random(window)
    prompts = [[rng.randrange(3, 500) for _ in range(length)] for length in (5, 40, 80)]
    forks = ForkCounter()
    with engine_on(folder, device_name, max_num_batched_tokens=64, speculative_config=ngram(3)) as engine:
        for _ in range(2):  # the second time on cached blocks
            outcomes = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
            for prompt, outcome in zip(prompts, outcomes, strict=True):
                forks.check(reference.greedy(prompt, 40), outcome.only.token_ids)
        assert engine.statistics().prefix_hit_tokens > 0
    assert forks.num_forks == 0
