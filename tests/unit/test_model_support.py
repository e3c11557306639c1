from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from server.errors import ModelError
from server.model.support import check_config


def config_of(model_type: str, **entries: Any) -> PreTrainedConfig:
    return CONFIG_MAPPING[model_type](**entries)


@pytest.mark.parametrize(
    ("model_type", "entries", "cause"),
    [
        ("t5", {}, "it is an encoder-decoder"),
        ("gpt2", {"add_cross_attention": True}, "it has cross-attention"),
        ("gemma3", {}, "it takes more than text"),
        ("deepseek_v3", {}, "multi-head latent attention"),
        ("mimo_v2_flash", {"head_dim": 192, "v_head_dim": 128}, "its K and V differ in width"),
        ("gemma3n_text", {}, "some of its layers use the KV of others"),
        ("mamba", {}, "layers of type linear_attention"),
        ("qwen3_next", {}, "layers of type linear_attention"),
        ("recurrent_gemma", {}, "layers of type attention, recurrent"),
        ("rwkv", {}, "recurrent layers, whose state cannot be rolled back"),
        ("llama4_text", {}, "layers of type chunked_attention"),
        ("bloom", {}, "BloomForCausalLM does not dispatch its attention"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "its weights are quantised (gptq)"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "is not a causal language model"),
        ("bert", {"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is not a causal language model"),
        ("vit", {}, "is not a causal language model"),
    ],
)
def test_refused(model_type: str, entries: dict[str, Any], cause: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_config(config_of(model_type, **entries), trusts_code=False)
    assert cause in str(caught.value)
    assert str(caught.value).endswith(
        "; supported are decoder-only causal language models with softmax attention in every layer, unquantised"
    )


@pytest.mark.parametrize(
    ("model_type", "entries"),
    [
        ("llama", {"architectures": ["LlamaForCausalLM"]}),
        ("mistral", {"sliding_window": 16}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("gpt2", {"architectures": ["GPT2LMHeadModel"]}),
        ("gpt_oss", {}),
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("phi3", {}),
        ("smollm3", {}),
    ],
)
def test_accepted(model_type: str, entries: dict[str, Any]) -> None:
    check_config(config_of(model_type, **entries), trusts_code=False)


def test_a_class_from_a_repository_is_left_to_the_check_after_loading() -> None:
    config = AutoConfig.for_model("bloom")
    config.auto_map = {"AutoModelForCausalLM": "own.OwnForCausalLM"}
    check_config(config, trusts_code=True)
    with pytest.raises(ModelError, match="does not dispatch"):
        check_config(config, trusts_code=False)
