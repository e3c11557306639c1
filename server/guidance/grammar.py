"""Compiled grammars, and how far one choice has come in one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Grammar:
    """A grammar that was compiled for a model's tokenizer; shared by threads and by all who follow it.

    Attributes:
        eos_token_ids: end the text wherever the grammar lets it end.
        is_worn_out: whether it has failed somebody. What is found out of a grammar while it is followed is kept for
            all, up to a limit; beyond that only compiling it anew helps.
    """

    def __init__(self, prototype: "LLMatcher", eos_token_ids: tuple[int, ...]) -> None:
        """Args: prototype: at the grammar's beginning, where it stays."""
        self._prototype = prototype
        self.eos_token_ids = eos_token_ids
        self.is_worn_out = False

    def start(self) -> "Matcher":
        """A matcher at the beginning; takes microseconds."""
        return Matcher(self, self._prototype.deep_copy())


class Matcher:
    """Where one choice stands in its grammar; used by one thread.

    Attributes:
        raw: for whoever computes masks.
    """

    def __init__(self, grammar: Grammar, raw: "LLMatcher") -> None:
        self._grammar = grammar
        self.raw = raw

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that are certain; what the grammar does not allow is an error from then on."""
        self.raw.consume_tokens(list(token_ids))

    def error(self) -> str | None:
        """Why it is of no more use: the grammar became too complex, or did not allow a token; None if it is fine."""
        if not self.raw.is_error():
            return None
        self._grammar.is_worn_out = True
        return self.raw.get_error().partition("\n")[0]
