"""What tokens stand for: their bytes, whichever way a tokenizer spells them."""

import contextlib
import re
from collections.abc import Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_BOUNDARY = "\N{LOWER ONE EIGHTH BLOCK}"


def is_byte_token(token: str) -> bool:
    """Whether it is spelled as one byte, such as <0x0A>."""
    return _BYTE_TOKEN.fullmatch(token) is not None


def text_of_tokens(tokenizer: Any, tokens: Mapping[int, str]) -> dict[int, bytes]:
    """The bytes of each token, by id, in the same order.

    Byte-level BPE spells every byte as a character, sentencepiece a space as a low block and rare bytes as
    <0x0A>. What the tokenizer's own decoder makes of samples tells which it is; added tokens are spelled plainly.

    Args: tokenizer: a fast one of transformers.
    """
    decoder = tokenizer.backend_tokenizer.decoder
    added = tokenizer.added_tokens_decoder

    def decodes(token: str, text: str) -> bool:
        return decoder is not None and decoder.decode(["x", token]) == "x" + text

    is_byte_level, has_boundaries = decodes(_BYTE_CHARACTERS[ord(" ")] + "y", " y"), decodes(_WORD_BOUNDARY + "y", " y")
    has_byte_tokens = decodes("<0x41>", "A")

    def text(token: str) -> bytes:
        if is_byte_level:
            with contextlib.suppress(UnicodeEncodeError):  # a character that stands for no byte
                return token.translate(_BYTES).encode("latin-1")
        if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return (token.replace(_WORD_BOUNDARY, " ") if has_boundaries else token).encode()

    return {token_id: token.encode() if token_id in added else text(token) for token_id, token in tokens.items()}


def _byte_characters() -> list[str]:
    """The characters that stand for the bytes 0 to 255 in byte-level BPE (Radford et al. 2019).

    Bytes that are printable in Latin-1 stand for themselves, the others, in order, for what follows Latin-1.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    following = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(following)) for byte in range(256)]


_BYTE_CHARACTERS = _byte_characters()
_BYTES = {ord(character): byte for byte, character in enumerate(_BYTE_CHARACTERS)}
