"""What the output of a request must look like."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.errors import InvalidRequest

MAX_CONSTRAINT_CHARS = 128 * 1024
MAX_TEXTS = 4096

WIRE_NAMES = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
}
"""The kinds of constraint, and the fields that carry them in the wire contract, which errors name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputsParams:
    """Exactly one constraint that the text satisfies in the end. Names follow vLLM's.

    Attributes:
        json: a JSON schema, as text or as the mapping itself; the schema that is just true allows any JSON.
        json_object: any JSON object.
        regex: a regular expression that the whole text matches.
        grammar: a Lark grammar, as llguidance takes it.
        choice: texts, of which the output is one.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Freeze the choice.

        Raises: InvalidRequest if there is not exactly one constraint, or if it is of another type, empty or too long.
        """
        given = [wire_name for name, wire_name in WIRE_NAMES.items() if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest.of("constraint", f"give exactly one of {', '.join(WIRE_NAMES.values())}, got {given}")
        if self.json_object not in (None, True):
            raise InvalidRequest.of("json_object", f"must be true if it is given, got {self.json_object!r}")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidRequest.of(name, f"must be text, got {getattr(self, name)!r}")
        texts = [text for text in (self.json, self.regex, self.grammar) if isinstance(text, str)]
        if self.choice is not None:
            texts = [] if isinstance(self.choice, str) else list(self.choice)
            if isinstance(self.choice, str) or not all(isinstance(text, str) for text in texts):
                raise InvalidRequest.of("choice", f"must be a list of texts, got {self.choice!r}")
            object.__setattr__(self, "choice", tuple(texts))
            if not 1 <= len(texts) <= MAX_TEXTS:
                raise InvalidRequest.of("choice", f"must have 1 to {MAX_TEXTS} texts, got {len(texts)}")
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            raise InvalidRequest.of(given[0], "must be valid Unicode without lone surrogates") from None
        if texts and not any(texts):
            raise InvalidRequest.of(given[0], "must not be empty")
        num_chars = sum(map(len, texts))
        if num_chars > MAX_CONSTRAINT_CHARS:
            raise InvalidRequest.of(given[0], f"at most {MAX_CONSTRAINT_CHARS} characters, got {num_chars}")

    @property
    def path(self) -> str:
        """The constraint's field in the wire contract."""
        return next(f"sampling.{field}" for name, field in WIRE_NAMES.items() if getattr(self, name) is not None)
