"""The tiny model's tokenizer without its weights."""

from pathlib import Path

from server.tokenizer import Tokenizer
from tests.tiny_model import CHAT_TEMPLATE, write_tokenizer


def tiny_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """The tokenizer that `build_tiny_model` writes, loaded from `folder`."""
    from transformers import AutoTokenizer

    write_tokenizer(folder, 512)
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = chat_template  # type: ignore[misc]  # the protocol only reads it
    return tokenizer
