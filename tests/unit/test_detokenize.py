"""Tokens become text at the right moment: no broken characters, nothing lost, ids with their text."""

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from server.engine.detokenize import MAX_PENDING, REPLACEMENT, ChoiceText, Decoder, IncrementalDecoder
from server.request import SamplingParams
from tests.fakes.executor import token_logprobs
from tests.fakes.tokenizers import tiny_tokenizer

TEXTS = {
    "ascii": "def main():\n    return 'x'",
    "accents": "naïve café",
    "combining": "e\u0301a\u0308\u0323",
    "cjk": "日本語の文章です。你好",
    "emoji": "😀😀🚀 a😀",
    "zwj": "👩‍👩‍👧‍👦🏳️‍🌈👍🏽",
    "flags": "🇨🇭🇯🇵",
    "rare": "\U00010348𝒳\u200b\u00ad",
    "own replacement": "a\ufffdb",
}


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class ByteFallback:
    """A tokenizer as SentencePiece models have it: ids 0 to 255 are bytes, some words follow, 300 is special."""

    def __init__(self) -> None:
        words = {"▁": 256, "▁a": 257, "b": 258, "é": 259, "日": 260}
        vocab = {**{f"<0x{byte:02X}>": byte for byte in range(256)}, **words, "<unk>": 261}
        self.words = {text.replace("▁", " "): token_id for text, token_id in words.items()}
        self._backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        self._backend.decoder = decoders.Sequence(parts)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return str(self._backend.decode([token_id for token_id in token_ids if token_id != 300]))


BYTE_FALLBACK = ByteFallback()


def byte_tokens(decoder: Decoder, text: str) -> list[int]:
    """One token per byte."""
    if isinstance(decoder, ByteFallback):
        return list(text.encode())
    alphabet = [decoder.decode([token_id], skip_special_tokens=True) for token_id in range(3, 259)]
    ascii_ids = {char: token_id for token_id, char in enumerate(alphabet, start=3) if char != REPLACEMENT}
    vocab = decoder.get_vocab()  # type: ignore[attr-defined]
    return [ascii_ids[chr(b)] if b < 128 else vocab[_byte_char(b)] for b in text.encode()]


def _byte_char(byte: int) -> str:
    """The character a byte-level vocabulary writes a byte as."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def pushed(decoder: Decoder, prompt: list[int], token_ids: list[int]) -> list[str]:
    incremental = IncrementalDecoder(decoder, prompt, skip_special_tokens=True)
    return [incremental.push(token_id)[0] for token_id in token_ids]


@pytest.mark.parametrize("name", TEXTS)
def test_real_tokens(byte_level: Decoder, name: str) -> None:
    token_ids = byte_level.encode(TEXTS[name], add_special_tokens=False)  # type: ignore[attr-defined]
    for split in range(len(token_ids)):
        prompt, output = token_ids[:split], token_ids[split:]
        head = byte_level.decode(prompt, skip_special_tokens=True)
        if not head.endswith(REPLACEMENT):
            assert head + "".join(pushed(byte_level, prompt, output)) == TEXTS[name]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@pytest.mark.parametrize("name", TEXTS)
def test_every_byte_a_token(byte_level: Decoder, kind: str, name: str) -> None:
    """Characters come whole, with the token of their last byte, whatever part of the text is the prompt."""
    decoder = byte_level if kind == "byte level" else BYTE_FALLBACK
    text = TEXTS[name]
    for split in range(len(text)):
        prompt, output = byte_tokens(decoder, text[:split]), text[split:]
        pieces = pushed(decoder, prompt, byte_tokens(decoder, output))
        if "own" not in name:
            expected = [part for char in output for part in [*[""] * (len(char.encode()) - 1), char]]
            assert pieces == expected
        assert "".join(pieces) == output


@given(data=st.data())
def test_any_mix_of_words_and_bytes(data: st.DataObject) -> None:
    decoder = BYTE_FALLBACK
    valid = st.one_of(
        st.sampled_from([[token_id] for token_id in decoder.words.values()]),
        st.text(min_size=1, max_size=3).filter(lambda t: REPLACEMENT not in t).map(lambda t: list(t.encode())),
        st.just([300]),
    )
    head = [257]  # a word: what comes after it keeps its spaces
    token_ids = [t for part in data.draw(st.lists(valid, max_size=12)) for t in part]
    whole = decoder.decode(head + token_ids, skip_special_tokens=True)
    assert "a" + "".join(pushed(decoder, head, token_ids)) == whole


@given(raw=st.binary(max_size=24))
def test_invalid_bytes_are_streamed_as_such(raw: bytes, byte_level_ids: "tuple[Decoder, dict[int, int]]") -> None:
    """The whole text as the tokenizer decodes it, but for what may still become a character at the end."""
    decoder, id_of_byte = byte_level_ids
    token_ids = [id_of_byte[byte] for byte in raw]
    whole = decoder.decode(token_ids, skip_special_tokens=True)
    streamed = "".join(pushed(decoder, [], token_ids))
    assert whole.startswith(streamed)
    assert set(whole[len(streamed) :]) <= {REPLACEMENT}
    assert len(whole) - len(streamed) <= 3


@pytest.fixture(scope="module")
def byte_level_ids(byte_level: Decoder) -> tuple[Decoder, dict[int, int]]:
    vocab = byte_level.get_vocab()  # type: ignore[attr-defined]
    return byte_level, {byte: vocab[_byte_char(byte)] for byte in range(256)}


def test_a_prompt_cut_within_a_character(byte_level: Decoder) -> None:
    for decoder, tail in ((byte_level, byte_tokens(byte_level, "bb")), (BYTE_FALLBACK, [258, 258])):
        smile = byte_tokens(decoder, "😀")
        for cut in (1, 2, 3):
            pieces = pushed(decoder, smile + smile[:cut], smile[cut:] + tail)
            assert "".join(pieces).lstrip(REPLACEMENT) == "bb"


class Counting:
    """Another decoder, and the most tokens that it was given at once."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.longest = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.longest = max(self.longest, len(token_ids))
        return self._decoder.decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_window_does_not_grow(tmp_path: Path) -> None:
    decoder = Counting(tiny_tokenizer(tmp_path))
    rng = random.Random(0)
    text = IncrementalDecoder(decoder, list(range(100)), skip_special_tokens=True)
    for _ in range(500):
        text.push(rng.choice([0, 50, 80, 100, 300, 511]))
    assert decoder.longest <= 16


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@pytest.mark.parametrize("raw", [b"\xff", b"\xe6\x97", b"\xf0\x9f\x98"])
def test_window_does_not_grow_over_bytes_that_are_no_text(
    byte_level_ids: "tuple[Decoder, dict[int, int]]", kind: str, raw: bytes
) -> None:
    decoder, ids = byte_level_ids if kind == "byte level" else (BYTE_FALLBACK, {byte: byte for byte in range(256)})
    token_ids = [ids[byte] for byte in raw * 300]
    counting = Counting(decoder)
    tail = [258, *(ids[byte] for byte in "é日😀".encode())]
    streamed = "".join(pushed(counting, [], token_ids + tail))
    assert streamed == decoder.decode(token_ids + tail, skip_special_tokens=True)
    assert counting.longest <= 2 * (MAX_PENDING + 1)


# -- the text of a choice ----------------------------------------------------------------------


class Pieces:
    """Token i stands for a given string."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(self._texts[token_id] for token_id in token_ids)


def run(texts: list[str], **sampling: object) -> tuple[list[tuple[str, tuple[int, ...]]], str | None]:
    """Push each piece as a token. Returns: what was streamed after each and at the end, and the match."""
    choice = ChoiceText(Pieces(*texts), [], SamplingParams(**sampling))  # type: ignore[arg-type]
    streamed: list[tuple[str, tuple[int, ...]]] = []
    stop: str | None = None
    for token_id in range(len(texts)):
        stop = choice.push(token_id, token_logprobs(token_id, token_id), is_stop_token=False)
        is_final = stop is not None or token_id == len(texts) - 1
        piece = choice.take(is_final=is_final)
        if piece is not None:
            assert [entry.chosen.token_id for entry in piece.logprobs] == list(piece.token_ids)
            streamed.append((piece.text, piece.token_ids))
        if stop is not None:
            assert choice.num_tokens == token_id + 1
            break
    assert choice.take(is_final=True) is None
    return streamed, stop


def joined(streamed: list[tuple[str, tuple[int, ...]]]) -> tuple[str, tuple[int, ...]]:
    return "".join(text for text, _ in streamed), tuple(i for _, ids in streamed for i in ids)


def test_without_stop_strings_each_token_streams_at_once() -> None:
    assert run(["a", "bc", "", "d"])[0] == [("a", (0,)), ("bc", (1,)), ("", (2,)), ("d", (3,))]


def test_beginning_of_a_stop_string_is_held_back_with_its_token() -> None:
    streamed, stop = run(["ab", "cS", "T", "x", "y"], stop=["STOP"])
    assert stop is None
    assert streamed == [("ab", (0,)), ("cSTx", (1, 2, 3)), ("y", (4,))]


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_at_every_offset_and_split(include: bool) -> None:
    """Any cut of the text into tokens gives the same text and the ids through the token that completes the match."""
    text = "aSTabSTOPcd"
    for first in range(1, len(text)):
        for second in range(first, len(text)):
            pieces = [text[:first], text[first:second], text[second:]]
            streamed, stop = run(pieces, stop=["STOP"], include_stop_str_in_output=include)
            end = text.index("STOP") + 4
            num_tokens = next(i for i in range(1, 4) if len("".join(pieces[:i])) >= end)
            assert stop == "STOP"
            assert joined(streamed) == ("aSTabSTOP" if include else "aSTab", tuple(range(num_tokens)))


@given(
    text=st.text("ab", min_size=1, max_size=12),
    cuts=st.sets(st.integers(1, 11)),
    stops=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_stop_strings_against_the_definition(
    text: str, cuts: set[int], stops: list[str], include: bool, min_tokens: int
) -> None:
    """Token by token: the earliest match that ends in the first eligible token ends the text."""
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    streamed, stop = run(pieces, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=100)
    expected, num_tokens = text, len(pieces)
    for i, (before, after) in enumerate(itertools.pairwise(bounds)):
        starts = [
            (start, stop_index)
            for stop_index, candidate in enumerate(stops)
            for start in range(after)
            if text.startswith(candidate, start) and before < start + len(candidate) <= after
        ]
        if starts and i + 1 > min_tokens:
            start, stop_index = min(starts)
            assert stop == stops[stop_index]
            expected = text[: start + len(stops[stop_index])] if include else text[:start]
            num_tokens = i + 1
            break
    else:
        assert stop is None
    assert joined(streamed) == (expected, tuple(range(num_tokens)))


def test_text_before_min_tokens_is_not_held_against_the_stop() -> None:
    streamed, stop = run(["ST", "OP", "x", "STOP"], stop="STOP", min_tokens=2)
    assert stop == "STOP"
    assert joined(streamed) == ("STOPx", (0, 1, 2, 3))


def test_a_stop_token_has_no_text_and_releases_what_was_held() -> None:
    choice = ChoiceText(Pieces("aS", "T", "<eos>"), [], SamplingParams(stop="STOP"))
    for token_id in range(2):
        assert choice.push(token_id, None, is_stop_token=False) is None
        assert choice.take(is_final=False) is None
    assert choice.push(2, None, is_stop_token=True) is None
    piece = choice.take(is_final=True)
    assert piece is not None
    assert (piece.text, piece.token_ids) == ("aST", (0, 1, 2))


def test_ids_of_a_character_come_with_it(byte_level: Decoder) -> None:
    token_ids = byte_tokens(byte_level, "a😀b")
    choice = ChoiceText(byte_level, [], SamplingParams())
    streamed: list[tuple[str, int]] = []
    for token_id in token_ids:
        choice.push(token_id, None, is_stop_token=False)
        piece = choice.take(is_final=False)
        if piece is not None:
            streamed.append((piece.text, len(piece.token_ids)))
    assert streamed == [("a", 1), ("😀", 4), ("b", 1)]


def test_an_incomplete_end_keeps_its_ids_but_has_no_text(byte_level: Decoder) -> None:
    token_ids = byte_tokens(byte_level, "a😀")[:-1]
    choice = ChoiceText(byte_level, [], SamplingParams())
    for token_id in token_ids:
        choice.push(token_id, None, is_stop_token=False)
    piece = choice.take(is_final=True)
    assert piece is not None
    assert (piece.text, piece.token_ids) == ("a", tuple(token_ids))
