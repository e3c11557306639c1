"""Writes an EAGLE-3 head with random weights: what drafting costs with a head of that size that is always wrong.

    python -m tests.bench.random_head MODEL FOLDER [--draft-vocab-size N]

Then `{"method": "eagle3", "model": "FOLDER"}` for MODEL, which is a folder, a packaged model's name or a hub id.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from server.model.resolve import pull

NUM_TAPS = 3


def write_random_head(model: Path, folder: Path, draft_vocab_size: int) -> None:
    """One decoder layer of Llama in the target's sizes, in bfloat16. Args: model: its folder. folder: to be made."""
    target = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, heads = target["hidden_size"], target["num_attention_heads"]
    kv_heads = target.get("num_key_value_heads") or heads
    head_dim = target.get("head_dim") or hidden // heads
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "draft_vocab_size": draft_vocab_size,
        "rms_norm_eps": 1e-5,
    } | {
        name: target[name]
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
    }
    shapes = {
        "fc": (hidden, NUM_TAPS * hidden),
        "midlayer.self_attn.q_proj": (heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * head_dim),
        "midlayer.mlp.gate_proj": (target["intermediate_size"], hidden),
        "midlayer.mlp.up_proj": (target["intermediate_size"], hidden),
        "midlayer.mlp.down_proj": (hidden, target["intermediate_size"]),
        "lm_head": (draft_vocab_size, hidden),
    }
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {
        f"{name}.weight": (torch.randn(shape, generator=generator) / shape[1] ** 0.5).bfloat16()
        for name, shape in shapes.items()
    }
    norms = ("norm", *(f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")))
    tensors |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    tensors["d2t"] = torch.zeros(draft_vocab_size, dtype=torch.int64)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--draft-vocab-size", type=int, default=8192, metavar="N", help="tokens it knows")
    args = parser.parse_args()
    write_random_head(pull(args.model), args.folder, args.draft_vocab_size)


if __name__ == "__main__":
    main()
