"""Writes a tiny Llama folder as a GGUF file."""

import json
from pathlib import Path

import gguf
import numpy as np
from transformers import AutoModelForCausalLM

from tests.tiny_model import CHAT_TEMPLATE


def write_gguf(path: Path, folder: Path, file_type: gguf.GGMLQuantizationType, *, adds_bos: bool = False) -> Path:
    """Write the tiny Llama in `folder` as one GGUF file; matrices in `file_type`, norms in float32."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    ids: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(ids, key=lambda token: ids[token])
    tokens += [f"<unused{i}>" for i in range(len(tokens), config["vocab_size"])]

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(adds_bos)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        weight = tensor.float().numpy()
        if name.endswith("q_proj.weight"):
            weight = _permute(weight, config["num_attention_heads"])
        if name.endswith("k_proj.weight"):
            weight = _permute(weight, config["num_key_value_heads"])
        theirs = names.get_name(name, try_suffixes=(".weight",))
        assert theirs is not None
        kind = file_type if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(theirs, gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows in the order of GGUF's interleaved rotary embedding."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
