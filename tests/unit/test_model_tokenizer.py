import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from server.config import ModelConfig
from server.errors import ConfigError, ModelError
from server.model.generation_defaults import eos_token_ids, generation_defaults
from server.model.tokenizer import load_tokenizer
from tests.tiny_model import build_tiny_model

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


def load(folder: Path, vocab_size: int = 512, **settings: Any) -> PreTrainedTokenizerBase:
    return load_tokenizer(folder, ModelConfig(model=str(folder), **settings), vocab_size=vocab_size)


def render(tokenizer: PreTrainedTokenizerBase) -> str:
    text: str = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    return text


def test_the_models_own(tiny: Path) -> None:
    assert render(load(tiny)) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("as_file", [False, True])
def test_another_chat_template(as_file: bool, tiny: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    assert render(load(tiny, chat_template=str(tmp_path / "chat.jinja") if as_file else template)) == "[hi]"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("no/such/file.jinja", "--chat-template no/such/file.jinja: cannot be read as a file"),
        ("{% for m in messages %}", "--chat-template is not valid Jinja, line 1: "),
    ],
)
def test_a_chat_template_that_cannot_be_used(template: str, expected: str, tiny: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tiny, chat_template=template)
    assert str(caught.value).startswith(expected)


def test_a_template_may_refuse_a_conversation(tiny: Path) -> None:
    template = "{{ raise_exception('a system message comes first') }}"
    assert load(tiny, chat_template=template).chat_template == template


def test_another_tokenizer(tiny: Path, tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path, vocab_size=300)
    assert len(load(tiny, tokenizer=str(other))) == 300
    with pytest.raises(ModelError, match=r"has ids up to 440, the model's vocabulary ends at 299"):
        load(other, vocab_size=300, tokenizer=str(tiny))


def test_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"cannot load a tokenizer from .*: the folder has none; .* --tokenizer"):
        load(tmp_path)


@pytest.mark.parametrize("given", ["/nope", "./nope", "~/no/such/folder"])
def test_a_folder_that_is_not_there(given: str, tiny: Path) -> None:
    with pytest.raises(ModelError, match=f"^--tokenizer {given}: no such folder"):
        load(tiny, tokenizer=given)


def test_a_long_prompt_is_none_of_the_tokenizers_business(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    entries = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**entries, "model_max_length": 4}))
    warned: list[str] = []
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", lambda text, *_: warned.append(text))
    assert len(load(folder)("one two three four five six")["input_ids"]) > 4
    assert warned == []


def test_a_missing_hub_tokenizer(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="cannot load a tokenizer from owner/missing"):
        load(tiny, tokenizer="owner/missing")


class TestGenerationConfig:
    def write(self, folder: Path, **entries: Any) -> Path:
        (folder / "generation_config.json").write_text(json.dumps(entries))
        return folder

    def test_what_it_sets_is_taken_by_our_names(self, tmp_path: Path) -> None:
        given = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
        folder = self.write(tmp_path, **given, max_new_tokens=100, do_sample=False, pad_token_id=0, length_penalty=2)
        assert generation_defaults(folder) == {**given, "max_tokens": 100}

    def test_null_is_not_given(self, tmp_path: Path) -> None:
        assert generation_defaults(self.write(tmp_path, temperature=None)) == {}

    def test_without_the_file_nothing_is_set(self, tmp_path: Path) -> None:
        assert generation_defaults(tmp_path) == {}

    @pytest.mark.parametrize("entries", [{"top_p": 0}, {"temperature": -1}, {"temperature": "warm"}])
    def test_values_no_request_may_have(self, entries: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"not usable: .*; correct it, or ignore it with --generation-config vllm"):
            generation_defaults(self.write(tmp_path, **entries))

    @pytest.mark.parametrize("text", ["{", "[1]"])
    def test_a_broken_file(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ModelError, match=r"generation_config.json .*; fetch the model again"):
            generation_defaults(tmp_path)

    def test_eos_ids_where_only_the_tokenizer_has_one(self, tiny: Path, tmp_path: Path) -> None:
        assert eos_token_ids(tmp_path, LlamaConfig(eos_token_id=None), load(tiny)) == (2,)
        assert eos_token_ids(self.write(tmp_path, eos_token_id=[9, 3]), LlamaConfig(eos_token_id=3), load(tiny)) == (
            *(2, 3, 9),
        )
