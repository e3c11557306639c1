"""What Outrider needs of a tokenizer; transformers' fast tokenizers are such."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Called from several threads at once."""

    @property
    def chat_template(self) -> Any:
        """The Jinja source, or a falsy value if the model has none."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The tokens beyond the model's own vocabulary, by id."""

    def get_vocab(self) -> Mapping[str, int]:
        """Every token with its id."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The text's ids."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The ids' text."""

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """The conversation as the text the model was trained on, if `tokenize` is False."""


def longest_token(tokenizer: Tokenizer) -> int | None:
    """The most characters of text that one token can stand for, None where there is no such bound.

    Only byte-level BPE is known to keep every character: elsewhere a normaliser may drop some,
    or one unknown token may swallow many.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)  # tokenizers in plain Python have none
    if (
        backend is None
        or type(backend.model).__name__ != "BPE"
        or backend.model.unk_token is not None
        or backend.normalizer is not None
    ):
        return None
    if backend.pre_tokenizer is None or not _keeps_all_text(json.loads(backend.pre_tokenizer.__getstate__())):
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()):
        return None
    # Byte-level tokens have one character per byte, and no character of text has less than one byte.
    return max(map(len, tokenizer.get_vocab()))


def _keeps_all_text(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether the pre-tokenizer ends in bytes and no part of it drops what it splits at."""
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = {part["type"] for part in parts}
    return (
        "ByteLevel" in kinds
        and kinds <= {"ByteLevel", "Digits", "Split", "Punctuation"}
        and all(part.get("behavior") != "Removed" for part in parts)
    )
