"""A GGUF file written here from the tiny model must come back as that model."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from server.errors import ModelError
from server.model.gguf import convert_gguf, is_gguf
from tests.tiny_gguf import write_gguf
from tests.tiny_model import build_tiny_model

TEXTS = (
    "The quick brown fox",
    "  12 and  345",
    "日本語の文章です。 😀🚀 naïve\n\n",
    "<|im_start|>user\nhi<|im_end|>\n",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def converted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(write_gguf(folder / "tiny.gguf", tiny, gguf.GGMLQuantizationType.F32), folder)
    return folder


def test_weights_survive_unchanged(tiny: Path, converted: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(tiny).state_dict()
    actual = AutoModelForCausalLM.from_pretrained(converted, dtype="auto").state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_tokenizer_survives(tiny: Path, converted: Path) -> None:
    expected, actual = AutoTokenizer.from_pretrained(tiny), AutoTokenizer.from_pretrained(converted)
    for text in TEXTS:
        ids = actual(text).input_ids
        assert actual.decode(ids) == text
        if not any(character.isdigit() for character in text):
            assert ids == expected(text).input_ids
    chat = [{"role": "user", "content": "hi"}]
    assert actual.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (actual.bos_token_id, actual.eos_token_id, actual.pad_token_id) == (1, 2, 2)
    assert actual.decode([1, 2], skip_special_tokens=True) == ""


def test_digits_are_split_as_the_vocabulary_was_trained(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("  12 ab")
    assert [piece for piece, _ in pieces] == ["ĠĠ", "1", "2", "Ġab"]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_text_begins_as_the_file_says(adds_bos: bool, tiny: Path, tmp_path: Path) -> None:
    convert_gguf(write_gguf(tmp_path / "a.gguf", tiny, gguf.GGMLQuantizationType.F32, adds_bos=adds_bos), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer("The dog").input_ids[0] == 1) is adds_bos
    assert tokenizer("The dog", add_special_tokens=False).input_ids[0] != 1


def test_every_id_that_ends_a_turn_is_kept(converted: Path) -> None:
    entries = json.loads((converted / "generation_config.json").read_text())
    assert entries == {"bos_token_id": 1, "pad_token_id": 2, "eos_token_id": [2, 0]}


@pytest.mark.parametrize(
    ("file_type", "dtype"),
    [
        (gguf.GGMLQuantizationType.F32, "float32"),
        (gguf.GGMLQuantizationType.F16, "float16"),
        (gguf.GGMLQuantizationType.Q8_0, "bfloat16"),
        (gguf.GGMLQuantizationType.Q4_1, "bfloat16"),
    ],
)
def test_stored_type_follows_the_file(
    tiny: Path, tmp_path: Path, file_type: gguf.GGMLQuantizationType, dtype: str
) -> None:
    convert_gguf(write_gguf(tmp_path / "tiny.gguf", tiny, file_type), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == dtype
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config


@pytest.mark.parametrize("kept_nbytes", [8, 1000, 100_000])
def test_a_truncated_file_is_one_clear_error(tiny: Path, tmp_path: Path, kept_nbytes: int) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", tiny, gguf.GGMLQuantizationType.F32)
    source.write_bytes(source.read_bytes()[:kept_nbytes])
    with pytest.raises(ModelError, match=r"cannot convert .*fetch it again"):
        convert_gguf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_is_gguf(tmp_path: Path) -> None:
    (tmp_path / "yes").write_bytes(b"GGUF\x03")
    (tmp_path / "no").write_bytes(b"PK\x03\x04")
    assert is_gguf(tmp_path / "yes")
    assert not is_gguf(tmp_path / "no")
    assert not is_gguf(tmp_path / "missing")
