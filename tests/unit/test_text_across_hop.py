"""Text that one node begins and another goes on with is that of one node."""

import itertools
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.detokenize import ChoiceText, Decoder, Piece
from server.errors import InvalidRequest
from server.kv_handle import ChoiceState
from server.request import SamplingParams
from tests.fakes.executor import token_logprobs
from tests.fakes.tokenizers import tiny_tokenizer

LONG = "日本語の文章です。naïve café 😀😀🚀 def main():\n    return 'x' " * 3
TEXTS = (LONG, "def main():\n    return 'x'", "naïve café", "日本語の文章です", "😀😀🚀 a😀", "a\ufffdb", "abcabcabd")
STOPS = ((), ("return",), ("é",), ("語の", "章"), ("🚀 a",), ("abcabd", "zz"), ("x'", "def main():\n  !"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def push_all(text: ChoiceText, token_ids: list[int], pieces: list[Piece]) -> str | None:
    """Push and stream; the stop string that ends it."""
    for token_id in token_ids:
        stop = text.push(token_id, token_logprobs(token_id, 1), is_stop_token=False)
        piece = text.take(is_final=stop is not None)
        if piece is not None:
            pieces.append(piece)
        if stop is not None:
            return stop
    return None


def joined(pieces: list[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        sum((piece.token_ids for piece in pieces), ()),
        sum((piece.logprobs for piece in pieces), ()),
    )


@given(
    text=st.sampled_from(TEXTS),
    stop=st.sampled_from(STOPS),
    hops=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    includes_stop=st.booleans(),
    min_tokens=st.integers(0, 6),
    num_replayed=st.sampled_from([8, 64]),
)
@settings(max_examples=300)
def test_any_number_of_hops_changes_nothing(
    decoder: Decoder,
    text: str,
    stop: tuple[str, ...],
    hops: list[int],
    includes_stop: bool,
    min_tokens: int,
    num_replayed: int,
) -> None:
    token_ids = decoder.encode(text, add_special_tokens=False)  # type: ignore[attr-defined]
    sampling = SamplingParams(
        stop=stop, include_stop_str_in_output=includes_stop, min_tokens=min_tokens, max_tokens=None
    )
    whole: list[Piece] = []
    one_node = ChoiceText(decoder, [5, 6], sampling)
    expected_stop = push_all(one_node, token_ids, whole)
    if (rest := one_node.take(is_final=True)) is not None:
        whole.append(rest)

    pieces: list[Piece] = []
    node, found = ChoiceText(decoder, [5, 6], sampling), None
    cuts = sorted({hop for hop in hops if hop < len(token_ids)})
    for begin, end in itertools.pairwise([0, *cuts, len(token_ids)]):
        if begin:
            state = node.handed_on(ChoiceState(tuple(token_ids[:begin]), 7))
            assert len(state.logprobs) == begin - state.num_delivered_tokens
            node = ChoiceText(decoder, [5, 6], sampling)
            with patch("server.engine.detokenize.REPLAYED_TOKENS", num_replayed):
                node.resume(state)
        found = push_all(node, token_ids[begin:end], pieces)
        if found is not None:
            break
    if (rest := node.take(is_final=True)) is not None:
        pieces.append(rest)

    assert joined(pieces) == joined(whole)
    assert (found, node.num_tokens) == (expected_stop, one_node.num_tokens)


def test_a_token_without_text_is_delivered_once(decoder: Decoder) -> None:
    """A special token has no text: only the number of tokens tells whether it was delivered."""
    sampling = SamplingParams(max_tokens=None)
    prefill, decode = (ChoiceText(decoder, [5], sampling) for _ in range(2))
    prefill.push(1, None, is_stop_token=False)
    assert prefill.take(is_final=False) == Piece("", (1,), ())
    decode.resume(prefill.handed_on(ChoiceState((1,), 7)))
    assert decode.take(is_final=False) is None


def test_what_was_not_delivered_comes_from_the_second_node(decoder: Decoder) -> None:
    text = ChoiceText(decoder, [5], SamplingParams(max_tokens=None))
    text.resume(ChoiceState((70, 71), 7))
    piece = text.take(is_final=False)
    assert piece is not None
    assert piece.token_ids == (70, 71)


def test_what_cannot_be_is_refused_by_name(decoder: Decoder) -> None:
    half = decoder.encode("🚀", add_special_tokens=False)[0]  # type: ignore[attr-defined]
    incomplete = ChoiceText(decoder, [5], SamplingParams(max_tokens=None))
    with pytest.raises(InvalidRequest, match="delivered_tokens: the text of only 0"):
        incomplete.resume(ChoiceState((half,), 7, num_delivered_tokens=1))
    ended = ChoiceText(decoder, [5], SamplingParams(max_tokens=None, stop=["b"]))
    token_ids = tuple(decoder.encode("abc", add_special_tokens=False))  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest, match="token_ids: they complete the stop string 'b'"):
        ended.resume(ChoiceState(token_ids, 7))


def test_long_answers_are_not_decoded_again(decoder: Decoder) -> None:
    class Counting:
        num_calls = 0

        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            self.num_calls += 1
            return decoder.decode(token_ids, skip_special_tokens=skip_special_tokens)

    counting = Counting()
    text = ChoiceText(counting, [5], SamplingParams(max_tokens=None, stop=["nothing like it"]))
    text.resume(ChoiceState((70,) * 10_000, 7, num_delivered_tokens=9_999))
    assert text.num_tokens == 10_000
    assert counting.num_calls < 300
