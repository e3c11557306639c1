"""Public architectures by name, for measuring speed without their weights."""

import json
from collections.abc import Mapping
from pathlib import Path

_LLAMA: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
}
_LLAMA_3: Mapping[str, object] = {
    **_LLAMA,
    "vocab_size": 128_256,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
}
_ROPE_SCALING: Mapping[str, object] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES: Mapping[str, Mapping[str, object]] = {
    "135m": {  # SmolLM2-135M
        **_LLAMA,
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "1b": {  # Llama-3.2-1B
        **_LLAMA_3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_scaling": {**_ROPE_SCALING, "factor": 32.0},
    },
    "8b": {  # Llama-3.1-8B
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "rope_scaling": {**_ROPE_SCALING, "factor": 8.0},
    },
}
"""The config.json of each."""


def write_shape(name: str, folder: Path) -> Path:
    """Put the config.json of a shape into a new folder of its name. Returns: that folder."""
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
    return model
