"""Decoder layers that draft heads are made of: transformers' own, by the name of their architecture."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from server.errors import ModelError


@dataclass(frozen=True, slots=True)
class DecoderKind:
    """The classes of one architecture."""

    config: type[PreTrainedConfig]
    layer: type[nn.Module]
    norm: type[nn.Module]
    rotary: type[nn.Module]


KINDS: Mapping[str, DecoderKind] = {
    "llama": DecoderKind(LlamaConfig, LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen2": DecoderKind(Qwen2Config, Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding),
    "qwen3": DecoderKind(Qwen3Config, Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}


def layer_config(folder: Path, config: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a head's decoder layers; without a model_type they are Llama's.

    Raises: ModelError if it is none, or of an architecture that heads are not known to have.
    """
    name = config.get("model_type") or "llama"
    if name not in KINDS:
        raise ModelError(f"{folder} has decoder layers of {name}; supported are those of {', '.join(KINDS)}")
    kind = KINDS[name]
    try:
        layers = kind.config.from_dict({**config, "model_type": kind.config.model_type})
    except Exception as error:  # whatever the JSON leads to: ValueError, KeyError, TypeError, ...
        reason = " ".join(str(error).split())
        raise ModelError(f"{folder / 'config.json'} describes no decoder layers: {reason}") from error
    if layers.num_hidden_layers < 1:
        raise ModelError(f"{folder / 'config.json'} describes no decoder layers: num_hidden_layers is 0")
    return layers


def kind_of(config: PreTrainedConfig) -> DecoderKind:
    """The classes that go with a configuration."""
    return KINDS[config.model_type]
