"""Compiles constraints for a model's tokenizer."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from server.errors import InvalidRequest
from server.guidance.grammar import Grammar
from server.guidance.params import StructuredOutputsParams
from server.guidance.source import grammar_source
from server.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

MAX_CACHED = 256
"""Grammars that are kept for whoever asks for them next; those in use live on without it."""
MAX_LEXER_STATES = 50_000
"""Of one grammar, for all who follow it: 1 to 2 kB each."""
MAX_LEXER_FUEL = 100_000
"""Work on regular expressions for the mask of one token, on the step thread: some 7 ms."""
_MATCHES_NOTHING = "there is no text that it allows, or none that these tokens can spell"
MAX_ITEMS = 50_000
"""Work on rules for the mask of one token: some 3 ms."""


class _Refused(Exception):
    """Why a grammar cannot be followed."""


class GrammarCompiler:
    """Compiles and caches; thread-safe. Calls take up to a second: they belong in a thread pool of their own."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Args: eos_token_ids: the tokenizer's own if there is none."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._environment: LLTokenizer | None = None
        self._environment_lock = threading.Lock()
        self._cached: OrderedDict[str, Future[Grammar]] = OrderedDict()
        self._cache_lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of a constraint; from the cache if the same one was compiled before.

        Raises: InvalidRequest naming the constraint's field, and what is wrong with it or with the tokenizer.
        """
        from llguidance import LLMatcher

        source = grammar_source(params, LLMatcher)
        future, is_new = self._reserve(source)
        if is_new:
            try:
                future.set_result(self._compile(source))
            except BaseException as error:  # whoever waits for it must hear of it, whatever it is
                future.set_exception(error)
        try:
            return future.result()
        except _Refused as error:
            raise InvalidRequest.of(params.path, str(error)) from None

    def _reserve(self, source: str) -> "tuple[Future[Grammar], bool]":
        """What is or will be made of a text, and whether the caller is to make it."""
        with self._cache_lock:
            found = self._cached.pop(source, None)
            if found is not None and not _is_worn_out(found):
                self._cached[source] = found  # at the end: it was the last to be asked for
                return found, False
            future: Future[Grammar] = Future()
            self._cached[source] = future
            if len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
            return future, True

    def _compile(self, source: str) -> Grammar:
        """Raises: _Refused."""
        from llguidance import LLMatcher

        environment = self._load_environment()
        prototype = LLMatcher(environment, source, log_level=0, limits=_limits())
        if not prototype.is_error():
            prototype.compute_bitmask()  # the first takes longest, and all who follow the grammar share what it finds
        if prototype.is_error():
            reason = prototype.get_error().replace("<non-verbose/>", "").strip()
            raise _Refused(_MATCHES_NOTHING if reason == "NoExtensionBias" else reason)
        return Grammar(prototype, tuple(environment.eos_tokens))

    def _load_environment(self) -> "LLTokenizer":
        """What llguidance knows of the tokenizer; made once, in some tenths of a second."""
        with self._environment_lock:
            if self._environment is None:
                self._environment = self._make_environment()
            return self._environment

    def _make_environment(self) -> "LLTokenizer":
        from llguidance.hf import from_tokenizer

        vocabulary = self._tokenizer.get_vocab()
        if not vocabulary:
            raise _Refused("the model has no tokenizer, so no grammar can be followed: start it with --tokenizer")
        known = set(vocabulary.values())
        eos_token_ids = [token_id for token_id in self._eos_token_ids if token_id in known]
        tokenizer: Any = self._tokenizer  # what it must be, from_tokenizer looks for itself
        try:
            return from_tokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=eos_token_ids or None)
        except Exception as error:  # there are many kinds of tokenizers, and each may fail in its own way
            raise _Refused(f"the model's tokenizer cannot be used to follow grammars: {error}") from error


def _is_worn_out(future: "Future[Grammar]") -> bool:
    return future.done() and future.exception() is None and future.result().is_worn_out


def _limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        step_lexer_fuel=MAX_LEXER_FUEL,
        step_max_items=MAX_ITEMS,
        verbose_errors=False,  # they would hold the whole grammar
    )
