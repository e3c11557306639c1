"""Turns the tokens of one choice into text, applies stop strings, decides what may be streamed."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

from server.engine.protocol import PositionLogprobs
from server.engine.stop_strings import find_stop, held_back_length
from server.errors import InvalidRequest
from server.kv_handle import ChoiceState
from server.request import SamplingParams

REPLACEMENT = "\ufffd"
MAX_INCOMPLETE = 3
"""An incomplete character decodes to one U+FFFD, or with byte-fallback tokenizers to one per byte: at most 3."""
PROMPT_CONTEXT = 5
"""Prompt tokens that output is decoded behind, up to MAX_CONTEXT where that would cut a character."""
MAX_CONTEXT = PROMPT_CONTEXT + MAX_INCOMPLETE
MAX_PENDING = 64
"""Tokens without an end between characters that are decoded together: bytes that are no text may go on for ever."""

REPLAYED_TOKENS = 64
"""Delivered tokens that are decoded again where another node's choice is gone on with: enough to decode the next ones
behind, and few enough for the event loop. Earlier ones are context, as the prompt is."""


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of some ids; U+FFFD stands for bytes that are no character."""


class RememberingDecoder:
    """Remembers what single tokens decode to: most tokens are decoded twice, with the one before and as context.

    One for all choices, used from the event loop only; holds at most the vocabulary.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._texts: dict[tuple[int, bool], str] = {}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """What the decoder says."""
        if len(token_ids) != 1:
            return self._decoder.decode(token_ids, skip_special_tokens=skip_special_tokens)
        key = token_ids[0], skip_special_tokens
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = self._decoder.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


class IncrementalDecoder:
    """Decodes one growing list of ids.

    Text is decoded over a window of what ended between characters last and everything since, as
    a token's text depends on its left neighbours (word starts, spaces before punctuation).
    """

    def __init__(self, decoder: Decoder, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._context_text = ""
        self._returned = 0
        self._new: list[int] = []
        for length in range(PROMPT_CONTEXT, MAX_CONTEXT + 1):
            self._set_context(list(prompt_token_ids[-length:]))
            if not self._context_text.startswith(REPLACEMENT):
                return
        self._set_context([])  # no characters even there: bytes that would spoil what follows

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text this token completes, and whether the text now ends between characters."""
        self._new.append(token_id)
        text = self._decode(self._context + self._new)
        if not text.endswith(REPLACEMENT):
            new_text = text[self._returned :]
            if new_text:
                self._set_context(self._new)
            else:  # a token without text is no context: its right neighbour would seem to come first
                self._new = []
            return new_text, True
        num_incomplete = min(MAX_INCOMPLETE, len(text) - len(text.rstrip(REPLACEMENT)))
        if len(self._new) <= MAX_INCOMPLETE and not text.startswith(self._context_text):
            return "", False  # with byte fallback an incomplete character takes the bytes before it along
        stable = max(self._returned, len(text) - num_incomplete)
        new_text = text[self._returned : stable]
        self._returned = stable
        if len(self._new) > MAX_PENDING:
            self._shorten(len(text) - stable)
        return new_text, False

    def _shorten(self, num_incomplete: int) -> None:
        """Make context of all new tokens but those of the text's last characters, so many of which are incomplete."""
        last = self._new[-MAX_INCOMPLETE:]
        self._set_context(self._new[:-MAX_INCOMPLETE])
        self._new = last
        self._returned = len(self._decode(self._context + last)) - num_incomplete

    def _set_context(self, token_ids: list[int]) -> None:
        self._context, self._new = token_ids, []
        self._context_text = self._decode(token_ids)
        self._returned = len(self._context_text)

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class Piece(NamedTuple):
    """Text and tokens that may be streamed now; a tuple, as there is one per token."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]


class ChoiceText:
    """The text of one choice; used from the event loop only.

    Tokens are held back with their text: while it may turn into a stop string, and while a
    character is incomplete.
    """

    def __init__(self, decoder: Decoder, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._make_decoder = partial(IncrementalDecoder, decoder, skip_special_tokens=sampling.skip_special_tokens)
        self._prompt_token_ids = prompt_token_ids
        self._decoder = self._make_decoder(prompt_token_ids)
        self._stops: Sequence[str] = sampling.stop
        self._include_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self.num_tokens = 0
        # What was not streamed yet: text, tokens, and where in the text those end whose last character is complete.
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._ends: list[int] = []

    def push(self, token_id: int, logprobs: PositionLogprobs | None, *, is_stop_token: bool) -> str | None:
        """Take in one token. Returns: the stop string it completes, None if it completes none.

        A stop token adds no text. After a match the text ends before the stop string, or after it
        with include_stop_str_in_output, and nothing more may be pushed.
        """
        self.num_tokens += 1
        new_text, is_complete = ("", True) if is_stop_token else self._decoder.push(token_id)
        num_seen = len(self._text)
        self._text += new_text
        if new_text:  # whatever began before this token is complete now
            self._mark_complete()
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if is_complete:
            self._mark_complete()
        if not self._stops or not new_text or self.num_tokens <= self._min_tokens:
            return None
        # A match lies in what was not streamed: its beginning was held back.
        match = find_stop(self._text, num_seen, self._stops)
        if match is None:
            return None
        self._text = self._text[: match.end if self._include_stop else match.start]
        return match.stop

    def resume(self, state: ChoiceState) -> None:
        """Take in what another node has generated, and drop what it has delivered; before anything else.

        Raises: InvalidRequest where that node would have ended the choice, or cannot have delivered so much.
        """
        num_replayed = REPLAYED_TOKENS + max(map(len, self._stops), default=0)
        begin = max(0, state.num_delivered_tokens - num_replayed)
        if begin:
            self._decoder = self._make_decoder((*self._prompt_token_ids[-MAX_CONTEXT:], *state.token_ids[:begin]))
            self.num_tokens = begin
        count = state.num_delivered_tokens - begin
        logprobs = iter(state.logprobs)
        for i, token_id in enumerate(state.token_ids[begin:]):
            stop = self.push(token_id, next(logprobs, None) if i >= count else None, is_stop_token=False)
            if stop is not None:
                raise InvalidRequest.of("token_ids", f"they complete the stop string {stop!r}: the choice has ended")
        if count > len(self._ends):
            num_complete = begin + len(self._ends)
            raise InvalidRequest.of("delivered_tokens", f"the text of only {num_complete} tokens is complete")
        if count:
            self._drop(count)

    def handed_on(self, state: ChoiceState) -> ChoiceState:
        """The same with what the caller has of it."""
        num_delivered = self.num_tokens - len(self._token_ids)
        return replace(state, num_delivered_tokens=num_delivered, logprobs=tuple(self._logprobs))

    def _mark_complete(self) -> None:
        while len(self._ends) < len(self._token_ids):
            self._ends.append(len(self._text))

    def take(self, *, is_final: bool) -> Piece | None:
        """What may be streamed now; at the end everything. None if there is nothing."""
        if is_final or not (self._stops or len(self._ends) < len(self._token_ids)):
            piece = Piece(self._text, tuple(self._token_ids), tuple(self._logprobs))
            self._text, self._token_ids, self._logprobs, self._ends = "", [], [], []
            return piece if piece.token_ids or piece.text else None
        count = bisect_right(self._ends, len(self._text) - held_back_length(self._text, self._stops))
        if count == 0:
            return None
        piece = Piece(
            self._text[: self._ends[count - 1]], tuple(self._token_ids[:count]), tuple(self._logprobs[:count])
        )
        del self._logprobs[:count]
        self._drop(count)
        return piece

    def _drop(self, count: int) -> None:
        """Forget the first tokens, at least one, with their text; it is complete."""
        end = self._ends[count - 1]
        self._text = self._text[end:]
        del self._token_ids[:count]
        self._ends = [later - end for later in self._ends[count:]]
