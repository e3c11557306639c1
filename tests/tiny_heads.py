"""Builds tiny random draft heads for a tiny model, in the forms and with the names that heads are published with.

Like tiny_model.py: seeded, so the same options give the same bytes in every process.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 64, 4, 2, 16, 128, 512
"""tiny_model.py's."""

Shapes = dict[str, tuple[int, ...]]


def build_tiny_eagle(
    folder: Path,
    *,
    form: Literal["eagle", "speculators"] = "eagle",
    num_layers: int = 1,
    has_bias: bool = False,
    file: str = "model.safetensors",
    seed: int = 0,
) -> Path:
    """An EAGLE head, with the target's embedding and output projection. Returns: `folder`."""
    shapes: Shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    if has_bias:
        shapes["fc.bias"] = (HIDDEN,)
    for index in range(num_layers):
        shapes |= layer_shapes(f"layers.{index}.", HIDDEN)
    del shapes["layers.0.input_layernorm.weight"]
    tensors = random_tensors(shapes, seed)
    config = layer_config(num_layers)
    if form == "speculators":
        tensors = {
            name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): tensor
            for name, tensor in tensors.items()
        }
        config = {
            "speculators_model_type": "eagle",
            "transformer_layer_config": config,
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "layernorms": False,
            "fusion_bias": has_bias,
            "speculators_config": {"algorithm": "eagle", "verifier": {"name_or_path": "tiny"}},
        }
    return write_head(folder, config, tensors, file)


def build_tiny_eagle3(
    folder: Path,
    *,
    form: Literal["eagle3", "speculators"] = "eagle3",
    draft_vocab_size: int = VOCAB,
    taps: Sequence[int] = (0, 1),
    num_layers: int = 1,
    has_embedding: bool = False,
    has_output: bool = True,
    model_type: str = "llama",
    options: Mapping[str, Any] | None = None,
    file: str = "model.safetensors",
    seed: int = 0,
) -> Path:
    """An EAGLE-3 head. Args: options: further entries of config.json. Returns: `folder`."""
    options = dict(options or {})
    shapes: Shapes = {"fc.weight": (HIDDEN, len(taps) * HIDDEN), "norm.weight": (HIDDEN,)}
    for index in range(num_layers):
        shapes |= layer_shapes(f"layers.{index}.", 2 * HIDDEN if index == 0 else HIDDEN, model_type)
    shapes["layers.0.hidden_norm.weight"] = (HIDDEN,)
    if options.get("norm_before_fc"):
        shapes["input_norm.weight"] = (len(taps) * HIDDEN,)
    if options.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(len(taps))}
    if has_embedding:
        shapes["embed_tokens.weight"] = (VOCAB, HIDDEN)
    if has_output:
        shapes["lm_head.weight"] = (draft_vocab_size, HIDDEN)
    tensors = random_tensors(shapes, seed)
    if draft_vocab_size < VOCAB:
        known = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:draft_vocab_size].sort().values
        tensors["d2t"] = known - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, known, value=True)
    layers = layer_config(num_layers, model_type)
    own = {"draft_vocab_size": draft_vocab_size, "eagle_aux_hidden_state_layer_ids": list(taps), **options}
    if form == "speculators":
        verifier = {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}}
        config = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layers,
            "speculators_config": verifier,
        }
    else:
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        config = {**layers, "architectures": ["LlamaForCausalLMEagle3"]}
    return write_head(folder, {**config, **own}, tensors, file)


def build_tiny_medusa(
    folder: Path,
    *,
    form: Literal["medusa", "vllm"] = "medusa",
    num_heads: int = 3,
    num_layers: int = 1,
    output: Literal["own", "one", "target"] = "own",
    token_map: Sequence[int] | None = None,
    prefix: str = "",
    file: str = "medusa_lm_head.pt",
    seed: int = 0,
) -> Path:
    """Medusa heads.

    Args:
        output: an output projection for each head, one for all, or the target's.
        token_map: the tokens that the heads know; all if not given.
    Returns: `folder`.
    """
    names = ("{0}.{1}.linear.weight", "{0}.{1}.linear.bias", "{0}.{2}.weight")
    if form == "vllm":
        names = ("blocks.{0}.layers.{1}.weight", "blocks.{0}.layers.{1}.bias", "lm_heads.{0}.weight")
    shapes: Shapes = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            shapes[prefix + names[0].format(head, layer)] = (HIDDEN, HIDDEN)
            shapes[prefix + names[1].format(head, layer)] = (HIDDEN,)
        if output == "own":
            shapes[prefix + names[2].format(head, 0, num_layers)] = (VOCAB, HIDDEN)
    if output == "one":
        shapes[prefix + "lm_head.weight"] = (VOCAB, HIDDEN)
    tensors = random_tensors(shapes, seed)
    config: dict[str, Any] = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers}
    if form == "vllm":
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "num_heads": num_heads,
            "num_hidden_layers": num_layers,
            "original_lm_head": output == "one",
            "medusa_fc_bias": True,
        }
    if token_map is not None:
        tensors["token_map"] = torch.tensor(token_map)
        config["truncated_vocab_size"] = len(token_map)
    return write_head(folder, config, tensors, file)


def layer_config(num_layers: int, model_type: str = "llama") -> dict[str, Any]:
    """The part of config.json that describes decoder layers."""
    return {
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float16",
    }


def layer_shapes(prefix: str, attention_input: int, model_type: str = "llama") -> Shapes:
    """Names and shapes of a decoder layer's weights."""
    shapes: Shapes = {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, attention_input),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, attention_input),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, attention_input),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    if model_type == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def random_tensors(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    """Matrices wide enough that each step depends on its context, norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (1.5 / shape[-1] ** 0.5)
        if len(shape) > 1
        else 1 + 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def write_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str) -> Path:
    """Args: file: its name says whether it is safetensors or a pickle. Returns: `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(dict(tensors), folder / file)
    else:
        torch.save(dict(tensors), folder / file)
    return folder
