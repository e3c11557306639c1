"""Decoder layers are found by what they are, and told apart by what they compute."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from server.model.decoder_layers import find_decoder_layers, layer_kind
from tests.tiny_model import build_tiny_model


def test_layers_of_one_kind(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, num_layers=3))
    layers = find_decoder_layers(model, 3)
    assert list(layers) == list(model.model.layers)
    assert len({layer_kind(layer) for layer in layers}) == 1
    setattr(layers[1].get_submodule("self_attn"), "scaling", 0.5)  # noqa: B010 - for all that torch's types tell, it has none
    layers[2].set_submodule("mlp.down_proj", nn.Linear(128, 64, bias=True))
    assert len({layer_kind(layer) for layer in layers}) == 3


def test_sliding_and_full_attention_are_two_kinds() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        **sizes, head_dim=16, vocab_size=64, num_hidden_layers=3, layer_types=types, sliding_window=8
    )
    with torch.device("meta"):
        layers = find_decoder_layers(AutoModelForCausalLM.from_config(config), 3)
    kinds = [layer_kind(layer) for layer in layers]
    assert kinds[0] == kinds[2] != kinds[1]


def test_a_model_without_such_a_list() -> None:
    with pytest.raises(LookupError, match="2 decoder layers"):
        find_decoder_layers(nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])), 2)
