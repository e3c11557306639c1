"""Turns a prompt and sampling parameters into a Request, for gRPC and the offline API alike.

Everything here may block (tokenising, chat templates), so callers on an event loop run it
in a thread pool. A Preprocessor is shared by all threads of such a pool.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from server.continuation_check import check_continuation
from server.errors import FieldViolation, InvalidRequest
from server.guidance.compiler import GrammarCompiler
from server.guidance.grammar import Grammar
from server.guidance.params import StructuredOutputsParams
from server.kv_handle import Continuation
from server.request import ModelInfo, Request, SamplingParams, SpeculationOptions
from server.tokenizer import Tokenizer, longest_token

MAX_REQUEST_ID_CHARS = 256
MAX_VIOLATIONS = 16
"""Violations listed of one id list: enough to find the cause, few enough for a status message."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text, tokenised with the model's special tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Token ids, used as they are."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as (role, content) pairs, oldest first, rendered with the model's chat template."""

    messages: Sequence[tuple[str, str]]


Prompt = TextPrompt | TokensPrompt | ChatPrompt

_FIELDS: dict[type[Prompt], str] = {TextPrompt: "text", TokensPrompt: "token_ids.ids", ChatPrompt: "chat.messages"}


def check_request_id(request_id: str) -> None:
    """Raises: InvalidRequest if the id is empty, longer than MAX_REQUEST_ID_CHARS or not printable."""
    if not request_id.isprintable():  # it stands in logs
        raise InvalidRequest.of("request_id", "must not have control characters")
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequest.of(
            "request_id", f"must have 1 to {MAX_REQUEST_ID_CHARS} characters, got {len(request_id)}"
        )


class Preprocessor:
    """Tokenises, validates against the loaded model, compiles grammars, resolves every default; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, model_info: ModelInfo) -> None:
        self.model_info = model_info
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(
            tokenizer, vocab_size=model_info.vocab_size, eos_token_ids=model_info.eos_token_ids
        )
        longest = longest_token(tokenizer)
        self._max_text_chars = math.inf if longest is None else longest * model_info.max_model_len
        self.token_text: Callable[[int], str] = functools.cache(self._decode_one)
        """The text of one token alone, kept for every id that was asked for."""

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self._tokenizer.chat_template)

    def build(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: str,
        speculation: SpeculationOptions = SpeculationOptions(),
        priority: int = 0,
        cache_salt: str = "",
        arrival_s: float = 0.0,
        deadline_s: float | None = None,
        hands_on: bool = False,
        continuation: Continuation | None = None,
    ) -> Request:
        """A Request that fits the model. Field names in errors are paths of the wire contract.

        Args:
            sampling: `max_tokens` None means to the end of the context or of the KV pool.
            arrival_s, deadline_s: on the engine's clock.
            hands_on, continuation: see Request; checked here, but for its texts.
        Raises: InvalidRequest.
        """
        check_request_id(request_id)
        self._check_sampling_ids(sampling)
        self._check_speculation(speculation)
        bad_words = tuple(ids for i, word in enumerate(sampling.bad_words) for ids in self._bad_word_ids(i, word))
        token_ids = self._prompt_ids(prompt)
        fitted = self._fit(sampling, len(token_ids), _FIELDS[type(prompt)])
        if continuation is not None:
            fitted = replace(fitted, prompt_logprobs=None)  # they were reported where it began
        resolved = self._resolved(speculation, sampling)
        eos = () if sampling.ignore_eos else self.model_info.eos_token_ids
        grammar = None
        if sampling.structured_outputs is not None:  # last, as it takes longest
            grammar = self._compile(sampling.structured_outputs, resolved)
            eos = grammar.eos_token_ids
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling=fitted,
            stop_token_ids=frozenset((*sampling.stop_token_ids, *eos)),
            bad_words_token_ids=bad_words,
            grammar=grammar,
            speculation=resolved,
            priority=priority,
            cache_salt=cache_salt,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            hands_on=hands_on,
            continuation=continuation,
        )
        if continuation is not None:
            check_continuation(request, self.model_info.vocab_size)
        return request

    def tokenize(self, prompt: TextPrompt | ChatPrompt, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a prompt, however many. A template brings its own special tokens.

        Raises: InvalidRequest for text that is not Unicode, an empty conversation, a template that refuses it.
        """
        if isinstance(prompt, ChatPrompt):
            return self._encode(_FIELDS[ChatPrompt], self._render(prompt), add_special_tokens=False)
        return self._encode(_FIELDS[TextPrompt], prompt.text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of some ids. Raises: InvalidRequest for ids outside the vocabulary."""
        self._check_ids("token_ids", token_ids)
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def _decode_one(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        field = _FIELDS[type(prompt)]
        limit = self.model_info.max_model_len
        if isinstance(prompt, TokensPrompt):
            # The length first: it alone decides about a list that is far too long.
            self._check_prompt_len(field, len(prompt.token_ids))
            token_ids = tuple(prompt.token_ids)
            self._check_ids(field, token_ids)
            return token_ids
        if isinstance(prompt, ChatPrompt) and len(prompt.messages) > limit:  # a template takes long over a million
            raise InvalidRequest.of(field, f"has {len(prompt.messages)} messages, more than max_model_len ({limit})")
        text = prompt.text if isinstance(prompt, TextPrompt) else self._render(prompt)
        if len(text) > self._max_text_chars:
            raise InvalidRequest.of(
                field, f"has {len(text)} characters, more than max_model_len ({limit}) tokens can spell"
            )
        token_ids = tuple(self._encode(field, text, add_special_tokens=isinstance(prompt, TextPrompt)))
        self._check_prompt_len(field, len(token_ids))
        return token_ids

    def _encode(self, field: str, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest.of(field, "must be valid Unicode without lone surrogates") from error

    def _check_prompt_len(self, field: str, prompt_len: int) -> None:
        if prompt_len == 0:
            raise InvalidRequest.of(field, "the prompt has no tokens")
        limit = self.model_info.max_model_len
        if prompt_len >= limit:
            raise InvalidRequest.of(
                field,
                f"the prompt has {prompt_len} tokens, but max_model_len is {limit} and one must be left to generate",
            )

    def _fit(self, sampling: SamplingParams, prompt_len: int, field: str) -> SamplingParams:
        """Resolve max_tokens: capped by the context silently, by the KV pool only if it was not asked for."""
        context_room = self.model_info.max_model_len - prompt_len
        pool_room = self.model_info.max_request_len - prompt_len
        if pool_room < 1:
            raise InvalidRequest.of(
                field,
                f"the prompt has {prompt_len} tokens, but the KV cache holds {self.model_info.max_request_len}"
                " for one request, prompt and output together",
            )
        if sampling.max_tokens is None:
            max_tokens = min(context_room, pool_room)
        elif (max_tokens := min(sampling.max_tokens, context_room)) > pool_room:
            raise InvalidRequest.of(
                "sampling.max_tokens",
                f"prompt ({prompt_len}) and max_tokens ({max_tokens}) make {prompt_len + max_tokens} tokens,"
                f" but the KV cache holds {self.model_info.max_request_len} for one request",
            )
        return replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))

    def _render(self, prompt: ChatPrompt) -> str:
        if not prompt.messages:
            raise InvalidRequest.of("chat.messages", "must not be empty")
        if not self._tokenizer.chat_template:
            raise InvalidRequest.of("chat", "the model has no chat template; send text or token ids")
        messages = [{"role": role, "content": content} for role, content in prompt.messages]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # A template is foreign code: whatever it raises, this conversation was refused.
            raise InvalidRequest.of("chat", f"the model's chat template refused it: {error}") from error
        return str(text)

    def _bad_word_ids(self, position: int, word: str) -> Iterable[tuple[int, ...]]:
        """The word's ids at the start of a text and, where that is as long but differs, after a space."""
        field = f"sampling.bad_words[{position}]"
        bare = tuple(self._encode(field, word.lstrip(), add_special_tokens=False))
        if not bare:
            raise InvalidRequest.of(field, f"has no tokens: {word!r}")
        spaced = tuple(self._encode(field, " " + word.lstrip(), add_special_tokens=False))
        return (bare, spaced) if spaced[0] != bare[0] and len(spaced) == len(bare) else (bare,)

    def _check_sampling_ids(self, sampling: SamplingParams) -> None:
        self._check_ids("sampling.stop_token_ids", sampling.stop_token_ids)
        self._check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids or ())
        size = self.model_info.vocab_size
        outside = [token_id for token_id in sampling.logit_bias if not 0 <= token_id < size]
        if outside:
            raise InvalidRequest(
                *(
                    FieldViolation(f"sampling.logit_bias[{token_id}]", f"the id must be below vocab_size ({size})")
                    for token_id in outside[:MAX_VIOLATIONS]
                )
            )

    def _check_ids(self, field: str, token_ids: Sequence[int]) -> None:
        size = self.model_info.vocab_size
        if not token_ids or (max(token_ids) < size and min(token_ids) >= 0):
            return
        outside = [(i, token_id) for i, token_id in enumerate(token_ids) if not 0 <= token_id < size]
        raise InvalidRequest(
            *(
                FieldViolation(f"{field}[{i}]", f"must be below vocab_size ({size}), got {token_id}")
                for i, token_id in outside[:MAX_VIOLATIONS]
            )
        )

    def _compile(self, params: StructuredOutputsParams, speculation: SpeculationOptions) -> Grammar:
        if speculation.is_synthetic and speculation.enabled and speculation.num_speculative_tokens:
            raise InvalidRequest.of(params.path, "no grammar can be kept while drafts are accepted at synthetic rates")
        return self._grammars.compile(params)

    def _resolved(self, speculation: SpeculationOptions, sampling: SamplingParams) -> SpeculationOptions:
        """With the server's defaults for what the request leaves open."""
        info, wanted = self.model_info, speculation.num_speculative_tokens
        is_judged = not sampling.is_greedy and sampling.seed is None
        return SpeculationOptions(
            enabled=speculation.enabled,
            num_speculative_tokens=info.num_speculative_tokens if wanted is None else wanted,
            metrics=speculation.metrics or info.speculation_metrics,
            is_synthetic=is_judged and info.rejection_sample_method == "synthetic",
        )

    def _check_speculation(self, speculation: SpeculationOptions) -> None:
        limit = self.model_info.num_speculative_tokens
        wanted = speculation.num_speculative_tokens
        if wanted is not None and not 0 <= wanted <= limit:
            raise InvalidRequest.of(
                "speculation.num_speculative_tokens", f"must be from 0 to the server's own {limit}, got {wanted}"
            )
