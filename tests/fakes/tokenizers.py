"""Tokenizers without a model: that of the tiny one, and some whose every token the test chooses."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from server.tokenizer import Tokenizer
from tests.tiny_model import CHAT_TEMPLATE, write_tokenizer


def tiny_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """The tokenizer that `build_tiny_model` writes, loaded from `folder`."""
    from transformers import AutoTokenizer

    write_tokenizer(folder, 512)
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = chat_template  # type: ignore[misc]  # the protocol only reads it
    return tokenizer


def byte_level_tokenizer(pieces: Sequence[str], *, controls: Sequence[str] = (), **roles: str) -> Tokenizer:
    """Pieces spelled as byte-level BPE spells them, by their place; then those of single bytes that are missing.

    Args: controls: special tokens, which come last. roles: eos_token and the like, special as well.
    """
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(pieces))
    backend = Backend(models.Unigram([(piece, -len(pieces) / len(piece)) for piece in [*pieces, *alphabet]], None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _fast(backend, controls, roles)


def sentencepiece_tokenizer(pieces: Sequence[str], *, controls: Sequence[str] = (), **roles: str) -> Tokenizer:
    """<unk>, the 256 single bytes, then the pieces, in which a low block stands for a space."""
    every = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [(piece, -len(every) / len(piece)) for piece in every]
    backend = Backend(models.Unigram(scores, 0, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _fast(backend, controls, {"unk_token": "<unk>", **roles})


def _fast(backend: Backend, controls: Sequence[str], roles: Mapping[str, str]) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    backend.add_special_tokens(list(controls))
    tokenizer: Tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
    return tokenizer
