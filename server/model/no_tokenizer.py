"""What stands in for the tokenizer of a model that has none."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from server.errors import InvalidRequest

_PATTERNS = ("tokenizer*", "*.tiktoken", "vocab.*", "spiece.model")


def has_tokenizer(folder: Path) -> bool:
    """Whether a model's folder holds files of a tokenizer."""
    return any(True for pattern in _PATTERNS for _ in folder.glob(pattern))


class NoTokenizer:
    """Implements Tokenizer for token ids alone: text is refused, and ids stand for no text."""

    chat_template = None
    eos_token_id = None
    added_tokens_decoder: Mapping[int, Any] = {}

    def get_vocab(self) -> Mapping[str, int]:
        """Empty: no token has a text."""
        return {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raises: InvalidRequest."""
        raise InvalidRequest.of("text", "the model has no tokenizer: send token ids, or start it with --tokenizer")

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Empty."""
        return ""

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """Raises: InvalidRequest."""
        raise InvalidRequest.of("chat", "the model has no tokenizer: send token ids, or start it with --tokenizer")
