"""What is told of KV that does not fit."""

import pytest
import torch
from transformers import LlamaConfig

from server.kv_description import MAX_CHARS, describe, differences
from server.model.fingerprint import describe_kv, fingerprint, kv_fingerprint

CONFIG = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16}
ROPE = {"rope_type": "default", "rope_theta": 5e5}


def described(digest: str = "a" * 64, dtype: str = "float32", kv_dtype: str = "float32", **changes: object) -> str:
    config = LlamaConfig(**{**CONFIG, **changes})
    return describe_kv(digest, config, getattr(torch, dtype), getattr(torch, kv_dtype))


def fingerprinted(
    digest: str = "a" * 64, dtype: str = "float32", kv_dtype: str = "float32", **changes: object
) -> bytes:
    config = LlamaConfig(**{**CONFIG, **changes})
    return kv_fingerprint(fingerprint(digest, config, getattr(torch, dtype)), getattr(torch, kv_dtype))


def test_it_is_readable() -> None:
    text = described()
    parts = dict(word.split("=") for word in text.split(" "))
    assert {
        name: parts[name] for name in ("format", "dtype", "kv_dtype", "weights", "model", "layers", "kv_heads")
    } == {
        "format": "1",
        "dtype": "float32",
        "kv_dtype": "float32",
        "weights": "a" * 12,
        "model": "llama",
        "layers": "4",
        "kv_heads": "2",
    }
    assert (parts["head_size"], parts["attention"], parts["quantisation"]) == ("16", "none", "none")
    assert len(parts["rope"]) == 12
    assert len(text) <= MAX_CHARS / 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dtype": "bfloat16"}, "dtype bfloat16 there, float32 here"),
        ({"kv_dtype": "float8_e4m3fn"}, "kv_dtype float8_e4m3fn there, float32 here"),
        ({"digest": "b" * 64}, "weights bbbbbbbbbbbb there, aaaaaaaaaaaa here"),
        ({"num_hidden_layers": 3}, "layers 3 there, 4 here"),
        ({"num_key_value_heads": 4}, "kv_heads 4 there, 2 here"),
        ({"head_dim": 32}, "head_size 32 there, 16 here"),
        ({"max_position_embeddings": 1024}, "positions 1024 there, 2048 here"),
        ({"rope_parameters": ROPE}, "rope "),
        ({"sliding_window": 128}, "attention "),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantisation "),
        ({"num_hidden_layers": 3, "dtype": "bfloat16"}, "dtype bfloat16 there, float32 here; layers 3 there, 4 here"),
    ],
)
def test_whatever_changes_the_fingerprint_is_told_by_its_name(changes: dict[str, str], told: str) -> None:
    found = differences(described(), described(**changes))
    assert found.startswith(told)
    assert found.count(";") == len(changes) - 1
    assert fingerprinted(**changes) != fingerprinted()


def test_the_same_has_no_differences() -> None:
    assert differences(described(), described()) == ""
    assert fingerprinted() == fingerprinted()


@pytest.mark.parametrize("theirs", ["", " ", "no parts at all"])
def test_nothing_is_known_of_one_that_says_nothing(theirs: str) -> None:
    assert differences(described(), theirs) == ""


def test_parts_that_only_one_side_knows() -> None:
    assert differences("format=2 planes=1", "format=1") == "format 1 there, 2 here; planes unknown there, 1 here"
    assert differences("format=1", "format=1 sink=4") == "sink 4 there, unknown here"


def test_no_more_is_read_of_another_node_than_there_can_be() -> None:
    theirs = describe({f"n{i}": "x" * 50 for i in range(10_000)})
    assert len(differences("format=1", theirs)) < 3 * MAX_CHARS
