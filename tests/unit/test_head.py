"""The output projection against the models' own, and log probabilities from it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from server.errors import ModelError
from server.model.fusion import can_pack
from server.model.head import LMHead
from server.worker.logprobs import VOCAB_CHUNK, LogprobTensors, chosen_logprobs, prompt_logprobs
from server.worker.transfer import Transfer

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**TINY),
    "tied": LlamaConfig(**TINY, tie_word_embeddings=True),
    "cohere scales by a factor": CohereConfig(**TINY, logit_scale=0.0625),
    "granite scales by a divisor": GraniteConfig(**TINY, logits_scaling=8.0),
    "gemma2 caps": Gemma2Config(**TINY, final_logit_softcapping=3.0),
    "gpt-neox": GPTNeoXConfig(**{key: value for key, value in TINY.items() if key != "head_dim"}),
}


def build(config: PreTrainedConfig, device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).to(device).eval()
    model.get_output_embeddings().weight.data.normal_()
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_logits_equal_the_model_s_own(device_name: str, name: str) -> None:
    model = build(ARCHITECTURES[name], device_name)
    head = LMHead.of(model, model.config)
    token_ids = torch.arange(1, 20, device=device_name)[None]
    hidden = model.base_model(token_ids, use_cache=False).last_hidden_state[0]
    expected = model(token_ids, use_cache=False).logits[0]
    assert expected.abs().max() > 1, "a comparison of zeros shows nothing"
    torch.testing.assert_close(head.logits(hidden), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.logits_between(hidden, 40, 90), expected[:, 40:90], rtol=1e-5, atol=1e-5)
    targets = torch.arange(60, 79, device=device_name)
    torch.testing.assert_close(
        head.logits_at(hidden, targets), expected.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-5
    )
    head.check(hidden, expected)


def test_an_unknown_transformation_is_found() -> None:
    head = LMHead(torch.eye(4), None, 1.0, None)
    hidden = torch.randn(3, 4)
    with pytest.raises(ModelError, match="transforms its logits"):
        head.check(hidden, hidden * 0.9)


def random_head(vocab_size: int, device: str, *, has_bias: bool = False) -> tuple[LMHead, Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    weight = torch.randn(vocab_size, 16, generator=generator).to(device)
    bias = torch.randn(vocab_size, generator=generator).to(device) if has_bias else None
    return LMHead(weight, bias, 1.0, None), torch.randn(5, 16, generator=generator).to(device)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_a_head_of_some_rows_gives_their_logits(device_name: str, name: str, is_packed: bool) -> None:
    model = build(ARCHITECTURES[name], device_name)
    head = LMHead.of(model, model.config, is_packed=is_packed and can_pack(torch.device(device_name)))
    token_ids = torch.tensor([90, 3, 41], device=device_name)
    hidden = torch.randn(5, 32, device=device_name)
    part = head.rows(token_ids)
    assert part.vocab_size == 3
    assert (part.packed is None) == (head.packed is None)
    torch.testing.assert_close(part.logits(hidden), head.logits(hidden)[:, token_ids])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("vocab_size", [50, VOCAB_CHUNK, VOCAB_CHUNK + 1, 3 * VOCAB_CHUNK - 5])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_prompt_logprobs_in_chunks_equal_those_of_all_logits(
    device_name: str, vocab_size: int, num_top: int, has_bias: bool
) -> None:
    head, hidden = random_head(vocab_size, device_name, has_bias=has_bias)
    logits = head.logits(hidden)
    targets = torch.tensor([0, vocab_size - 1, 7, 49, int(logits[4].argmax())], device=device_name)
    assert_same(prompt_logprobs(head, hidden, targets, num_top), chosen_logprobs(logits, targets, num_top))


def assert_same(got: LogprobTensors, expected: LogprobTensors) -> None:
    for name in ("chosen_ids", "ranks", "top_ids"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    for name in ("chosen", "top"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-5, atol=1e-5)


def test_more_logprobs_than_tokens_are_all_of_them(device_name: str) -> None:
    head, hidden = random_head(6, device_name)
    targets = torch.zeros(5, dtype=torch.int64, device=device_name)
    chosen = chosen_logprobs(head.logits(hidden), targets, 64)
    assert chosen.top.shape == (5, 6)
    assert_same(prompt_logprobs(head, hidden, targets, 64), chosen)


def test_ranks_and_values_of_a_known_distribution(device_name: str) -> None:
    probs = torch.tensor([[0.1, 0.6, 0.3], [0.25, 0.25, 0.5]], device=device_name)
    tensors = chosen_logprobs(probs.log(), torch.tensor([2, 0], device=device_name), 2)
    first, second = tensors.download(Transfer(torch.device("cpu"))).positions(0, 2, 2)
    assert (first.chosen.token_id, first.chosen.rank) == (2, 2)
    assert [(entry.token_id, entry.rank) for entry in first.top] == [(1, 1), (2, 2)]
    assert [round(entry.logprob, 4) for entry in first.top] == [-0.5108, -1.204]
    assert second.chosen.rank == 2
    assert tensors.positions(1, 1, 0)[0].top == ()
