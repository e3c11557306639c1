"""What a caller asks for: values that never change after the front made them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal

from server.errors import FieldViolation, InvalidRequest
from server.guidance.grammar import Grammar
from server.guidance.params import StructuredOutputsParams
from server.kv_handle import Continuation

MAX_CHOICES = 64
MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 128
"""Every bad word is looked up at every position, in the step that all requests share."""
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127
SpeculationMetrics = Literal["summary", "detailed"]
GREEDY_TEMPERATURE = 1e-5
"""Below this, dividing logits by the temperature loses them; such a request is greedy."""
_KINDS: Mapping[type, tuple[str, tuple[str, ...]]] = {
    Integral: ("an integer", ("n", "top_k", "min_tokens", "seed", "max_tokens", "logprobs", "prompt_logprobs")),
    Real: (
        "a number",
        ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    ),
    bool: ("true or false", ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")),
}
_OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_SEQUENCES: Mapping[str, tuple[type, str]] = {
    "stop": (str, "text"),
    "bad_words": (str, "text"),
    "stop_token_ids": (Integral, "an integer"),
    "allowed_token_ids": (Integral, "an integer"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Names, ranges and defaults follow vLLM's."""

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        """Freeze the sequences; one stop string may be given bare.

        Raises: InvalidRequest naming every field of another type, else every one out of range.
        """
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in _SEQUENCES:
            value = getattr(self, name)
            if isinstance(value, Iterable) and not isinstance(value, str | bytes):
                object.__setattr__(self, name, tuple(value))
        try:
            object.__setattr__(self, "logit_bias", {int(t): float(b) for t, b in dict(self.logit_bias or {}).items()})
        except (TypeError, ValueError):
            raise InvalidRequest.of(
                "logit_bias", f"must be a mapping from token ids to numbers, got {self.logit_bias!r}"
            ) from None
        if violations := self._wrong_types() or self._violations():
            raise InvalidRequest(*violations)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that occurred before are treated differently."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    def _wrong_types(self) -> "list[FieldViolation]":
        found: list[FieldViolation] = []
        for kind, (what, names) in _KINDS.items():
            for name in names:
                value = getattr(self, name)
                is_right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
                if not is_right and not (value is None and name in _OPTIONAL):
                    found.append(FieldViolation(name, f"must be {what}, got {value!r}"))
        for name, (kind, what) in _SEQUENCES.items():
            value = getattr(self, name)
            if not isinstance(value, tuple):
                if value is not None or name != "allowed_token_ids":
                    found.append(FieldViolation(name, f"must be a list, got {value!r}"))
            elif wrong := [i for i, item in enumerate(value) if not isinstance(item, kind)]:
                found.append(FieldViolation(f"{name}[{wrong[0]}]", f"must be {what}, got {value[wrong[0]]!r}"))
        return found

    def _violations(self) -> "list[FieldViolation]":
        found: list[FieldViolation] = []

        def require(name: str, is_valid: bool, accepted: str) -> None:
            if not is_valid:
                found.append(FieldViolation(name, f"must be {accepted}, got {getattr(self, name)!r}"))

        require("n", 1 <= self.n <= MAX_CHOICES, f"from 1 to {MAX_CHOICES}")
        require("temperature", 0 <= self.temperature <= FLOAT32_MAX, "finite in float32 and at least 0")
        require("top_k", -1 <= self.top_k <= INT64_MAX, "-1 or 0 (all), or at least 1, in 64 bits")
        require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        require("min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        require(
            "repetition_penalty",
            FLOAT32_MIN <= self.repetition_penalty <= FLOAT32_MAX,
            "finite in float32 and above 0",
        )
        for name in ("frequency_penalty", "presence_penalty"):
            require(name, -2 <= getattr(self, name) <= 2, "from -2 to 2")
        for token_id, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                found.append(FieldViolation(f"logit_bias[{token_id}]", f"must be from -100 to 100, got {bias!r}"))
        for name, most, longest in (("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARS), ("stop", MAX_STOP_STRINGS, None)):
            texts: Sequence[str] = getattr(self, name)
            if len(texts) > most:
                found.append(FieldViolation(name, f"at most {most} strings, got {len(texts)}"))
                continue
            for i, text in enumerate(texts):
                if not text:
                    found.append(FieldViolation(f"{name}[{i}]", "must not be empty"))
                elif longest is not None and len(text) > longest:
                    found.append(FieldViolation(f"{name}[{i}]", f"at most {longest} characters, got {len(text)}"))
        require("allowed_token_ids", self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "non-empty")
        require("seed", self.seed is None or INT64_MIN <= self.seed <= INT64_MAX, "a signed 64-bit integer")
        require("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        limit = math.inf if self.max_tokens is None else self.max_tokens
        require("min_tokens", 0 <= self.min_tokens <= limit, f"from 0 to max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(name, value is None or 0 <= value <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}")
        is_known = isinstance(self.structured_outputs, StructuredOutputsParams | None)
        require("structured_outputs", is_known, "a StructuredOutputsParams")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationOptions:
    """Speculation as one request wants it.

    Attributes:
        num_speculative_tokens: None means the server's own count; it is never above that.
        metrics: how much is told of it in the end: summary or detailed; None means as the server is configured.
        is_synthetic: whether drafts are accepted at configured rates; the front knows.
    """

    enabled: bool = True
    num_speculative_tokens: int | None = None
    metrics: SpeculationMetrics | None = None
    is_synthetic: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A validated request, tokenised, with every default resolved by the front.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: 1 to max_model_len - 1 ids, each below vocab_size.
        sampling: `max_tokens` is set and fits the context.
        stop_token_ids: ids that end a choice: the request's own, and EOS unless ignored.
        bad_words_token_ids: the token sequences of `sampling.bad_words`.
        grammar: `sampling.structured_outputs`, compiled. `stop_token_ids` then has its EOS in any case.
        deadline_s: on the engine's monotonic clock; None never expires.
        arrival_s: on the same clock.
        hands_on: whether each choice ends with its first token, for another node to go on with.
        continuation: what another node has done of it; None if it begins here.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    speculation: SpeculationOptions = SpeculationOptions()
    priority: int = 0
    cache_salt: str = ""
    arrival_s: float = 0.0
    deadline_s: float | None = None
    hands_on: bool = False
    continuation: Continuation | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """What is known of the model once it is loaded and the KV pool is sized.

    Attributes:
        max_model_len: longest context, prompt and output together, in tokens.
        max_request_len: the same, further limited by what the KV pool can hold.
        eos_token_ids: end a choice unless ignore_eos.
        generation_defaults: SamplingParams fields from the model's generation_config.
        num_kv_blocks: usable blocks (the null block is not counted).
        drafts_on_host: whether drafts are made on the host, from settled tokens.
        rejection_sample_method: which drafts of unseeded requests are accepted, see AcceptanceConfig.
        speculation_metrics: for requests that do not say.
        fingerprint: digest of weights, KV geometry and dtype; root of all block hashes. kv_description: what it follows
            from, see server.kv_description.
    """

    model: str
    served_model_name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    max_request_len: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, float | int]
    dtype: str
    device: str
    block_size: int
    num_kv_blocks: int
    speculative_method: str = "none"
    num_speculative_tokens: int = 0
    drafts_on_host: bool = False
    rejection_sample_method: str = "standard"
    speculation_metrics: SpeculationMetrics = "summary"
    fingerprint: bytes = b""
    kv_description: str = ""
