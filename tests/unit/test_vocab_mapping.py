"""Vocabularies of two tokenizers, mapped onto each other."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from proposers.vocab_mapping import VocabularyMapping, check_same_vocabulary, map_vocabularies
from server.errors import ConfigError
from server.model.no_tokenizer import NoTokenizer
from server.model.resolve import pull
from tests.fakes.tokenizers import byte_level_tokenizer, sentencepiece_tokenizer, tiny_tokenizer

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def size_of(tokenizer: Any) -> int:
    ids: list[int] = tokenizer.get_vocab().values()
    return 1 + max(ids)


def mapping_of(target: Any, draft: Any) -> VocabularyMapping:
    mapping = map_vocabularies(target, draft, size_of(target), size_of(draft))
    check_consistent(mapping)
    return mapping


def check_consistent(mapping: VocabularyMapping) -> None:
    """One to one, and the same in both tables."""
    shared = mapping.to_target >= 0
    own = mapping.to_target[shared]
    assert len(own.unique()) == len(own) == mapping.num_shared
    assert torch.equal(mapping.input_ids[own], shared.nonzero()[:, 0])
    assert ((mapping.input_ids >= 0) & (mapping.input_ids < len(mapping.to_target))).all()


def twin(mapping: VocabularyMapping, target: Any, draft: Any, token: str) -> str | None:
    """What a token of the target is in the draft."""
    found = (mapping.to_target == target.convert_tokens_to_ids(token)).nonzero()[:, 0].tolist()
    return draft.convert_ids_to_tokens(found[0]) if found else None


def given(mapping: VocabularyMapping, target: Any, draft: Any, token: str) -> str:
    """What the draft model is fed for it."""
    found: str = draft.convert_ids_to_tokens(int(mapping.input_ids[target.convert_tokens_to_ids(token)]))
    return found


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("Ġthe", f"{SPACE}the"),
        ("ing", "ing"),
        ("Ã©", "é"),
        ("æĹ¥", "日"),
        ("Ċ", "<0x0A>"),
        ("ĠĠ", SPACE * 2),
        ("Ġ", SPACE),
        ("A", "A"),
        ("B", "<0x42>"),
        ("Ł", "<0x9F>"),
        ("Ġof", None),
    ],
)
def test_tokens_meet_by_what_they_stand_for(token: str, expected: str | None) -> None:
    """A is both a piece and a byte of the draft's, the piece after the byte: text is made of pieces."""
    target = byte_level_tokenizer(["Ġthe", "ing", "Ã©", "æĹ¥", "ĠĠ", "Ġof"])
    draft = sentencepiece_tokenizer([f"{SPACE}the", "ing", "é", "日", SPACE * 2, SPACE, "A", "the"])
    assert twin(mapping_of(target, draft), target, draft, token) == expected
    back = mapping_of(draft, target)
    assert expected is None or twin(back, draft, target, expected) == token


def test_control_tokens_meet_alike_or_by_their_role() -> None:
    target = byte_level_tokenizer(
        ["</s>", "Ġa"], controls=["<|user|>", "<|tool|>"], eos_token="<|end|>", bos_token="<|begin|>"
    )
    draft = sentencepiece_tokenizer(
        [f"{SPACE}a", "<|tool|>"], controls=["<|user|>", "<|begin|>"], eos_token="</s>", bos_token="<s>"
    )
    mapping = mapping_of(target, draft)
    assert twin(mapping, target, draft, "<|end|>") == "</s>"
    assert twin(mapping, target, draft, "<|user|>") == "<|user|>"
    assert twin(mapping, target, draft, "<|begin|>") == "<|begin|>", "not <s>: it is there under its own name"
    assert twin(mapping, target, draft, "</s>") is None, "text, there a control token"
    assert twin(mapping, target, draft, "<|tool|>") is None, "a control token, there text"


def test_one_token_in_two_roles_is_mapped_once() -> None:
    target = byte_level_tokenizer(["a"], eos_token="<|end|>", pad_token="<|end|>")
    draft = byte_level_tokenizer(["a"], eos_token="</s>", pad_token="<pad>")
    mapping = mapping_of(target, draft)
    assert twin(mapping, target, draft, "<|end|>") == "</s>"
    assert mapping.to_target[draft.convert_tokens_to_ids("<pad>")] == -1  # type: ignore[attr-defined]


def test_of_several_tokens_for_one_text_the_first_is_taken() -> None:
    target = byte_level_tokenizer(["Ġa", "Ġb"])
    draft = sentencepiece_tokenizer([f"{SPACE}b", f"{SPACE}a"])
    draft.add_tokens([" b"])  # type: ignore[attr-defined]  # added tokens are spelled plainly
    mapping = mapping_of(target, draft)
    assert twin(mapping, target, draft, "Ġb") == f"{SPACE}b"
    assert mapping.to_target[size_of(draft) - 1] == -1


def test_what_the_draft_is_given_for_tokens_it_does_not_have() -> None:
    target = byte_level_tokenizer(["ing", "Ġthinking", "zz", "æĹ¥æľ", "ðŁ"], eos_token="<|end|>")
    draft = sentencepiece_tokenizer([f"{SPACE}think", "ing", "z"], eos_token="</s>")
    mapping = mapping_of(target, draft)
    assert given(mapping, target, draft, "ing") == "ing"
    assert given(mapping, target, draft, "Ġthinking") == "ing"
    assert given(mapping, target, draft, "zz") == "z"
    assert given(mapping, target, draft, "æĹ¥æľ") == "<0x9C>", "no whole characters: the last byte"
    no_bytes = byte_level_tokenizer(["z"], eos_token="</s>")
    small = map_vocabularies(target, no_bytes, size_of(target), 1)
    assert small.input_ids[target.convert_tokens_to_ids("ðŁ")] == 0, "nothing fits: the first token"  # type: ignore[attr-defined]


def test_the_models_sizes_are_what_counts() -> None:
    """Models have rows without a token, and tokenizers now and then tokens without a row."""
    target, draft = byte_level_tokenizer(["Ġa", "Ġb"]), byte_level_tokenizer(["Ġb", "Ġa"], eos_token="</s>")
    mapping = map_vocabularies(target, draft, size_of(target) + 6, 1)
    assert mapping.to_target.tolist() == [1]
    assert mapping.input_ids.tolist() == [0] * (size_of(target) + 6)


def test_tokens_decode_to_the_same_text(tmp_path: Path) -> None:
    """Trained tokenizers: what is shared is the same, and what is the same is shared."""
    target, draft = tiny_tokenizer(tmp_path), sentencepiece_tokenizer([*"aeiou", f"{SPACE}the", f"{SPACE}dog"])
    mapping = mapping_of(target, draft)
    for twin_id, token_id in enumerate(mapping.to_target.tolist()):
        if token_id >= 0:
            text = target.decode([token_id], skip_special_tokens=False)
            assert draft.decode([twin_id], skip_special_tokens=False) == text
    assert mapping.num_shared == 256 + 2, "every byte, and two words"


def test_a_vocabulary_is_itself(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    mapping = mapping_of(tokenizer, tokenizer)
    assert torch.equal(mapping.to_target, torch.arange(size_of(tokenizer)))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_default_models_vocabulary(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    smollm2, tiny = AutoTokenizer.from_pretrained(pull("smollm2-135m")), tiny_tokenizer(tmp_path)
    assert torch.equal(mapping_of(smollm2, smollm2).to_target, torch.arange(size_of(smollm2)))
    mapping = mapping_of(smollm2, tiny)
    assert mapping.num_shared > 0.7 * size_of(tiny)
    assert twin(mapping, smollm2, tiny, "<|im_end|>") == "<|im_end|>"
    assert twin(mapping, smollm2, tiny, "Ġdog") == "Ġdog"


def test_little_in_common_is_told_with_numbers(caplog: pytest.LogCaptureFixture) -> None:
    few = [chr(0x4E00 + n) for n in range(4000)]
    draft = sentencepiece_tokenizer(few)
    with caplog.at_level(logging.INFO):
        mapping_of(byte_level_tokenizer(["a"]), draft)
    assert f"of the draft model's {size_of(draft)} tokens the target has 256: it drafts little" in caplog.text
    assert "no token for the target's end of text" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        mapping_of(byte_level_tokenizer(["a"], eos_token="</s>"), byte_level_tokenizer(["a"], eos_token="<end>"))
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_nothing_in_common_is_refused() -> None:
    target, draft = byte_level_tokenizer(["a"]), byte_level_tokenizer(["b", "a"])
    with pytest.raises(ConfigError, match="none of the draft model's 1 tokens is among the target's 1"):
        map_vocabularies(target, draft, 1, 1)


def test_a_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"use_heterogeneous_vocab: both models need a tokenizer\.json"):
        map_vocabularies(NoTokenizer(), byte_level_tokenizer(["a"]), 256, 256)


@pytest.mark.parametrize(("target_size", "draft_size"), [(3, 5), (5, 3)])
def test_equal_ids(target_size: int, draft_size: int) -> None:
    mapping = VocabularyMapping.of_equal_ids(target_size, draft_size)
    assert mapping.to_target.tolist() == [0, 1, 2, -1, -1][:draft_size]
    assert mapping.input_ids.tolist() == [0, 1, 2, 2, 2][:target_size]


def test_the_same_vocabulary_with_other_padding() -> None:
    check_same_vocabulary(byte_level_tokenizer(["a", "b"]), byte_level_tokenizer(["a", "b"]), 300, 320)


@pytest.mark.parametrize(
    ("pieces", "controls", "size", "message"),
    [
        ("ac", [], 300, r"\(of 300, 256 of them tokens\) .* \(of 320, 256 .* 1 is 'b' for the target and 'c' for the"),
        ("ab", ["<|new|>"], 300, r"token 256 is none for the target and '<\|new\|>' for the draft"),
        ("ab", [], 200, r"token 200 is '.' for the target and none for the draft"),
    ],
)
def test_another_vocabulary_is_refused_by_its_first_difference(
    pieces: str, controls: list[str], size: int, message: str
) -> None:
    draft = byte_level_tokenizer(pieces, controls=controls)
    with pytest.raises(ConfigError, match=f"{message}.*set use_heterogeneous_vocab"):
        check_same_vocabulary(byte_level_tokenizer("ab"), draft, 320, size)


def test_without_tokenizers_sizes_are_compared() -> None:
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0})
    check_same_vocabulary(NoTokenizer(), tokenizer, 256, 256)
    with pytest.raises(ConfigError, match=r"\(of 128, 1 of them tokens\).*nothing else to go by"):
        check_same_vocabulary(NoTokenizer(), tokenizer, 256, 128)
