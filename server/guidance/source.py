"""Constraints in the language that they are compiled from."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from server.errors import InvalidRequest
from server.guidance.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

WHITESPACE = r"[ \t\n\r]{1,40}"
"""What may stand between two tokens of JSON. Without a bound, models that are unsure go on with it to the end."""


def grammar_source(params: StructuredOutputsParams, language: "type[LLMatcher]") -> str:
    """The constraint as llguidance's own format; equal texts mean equal grammars.

    Raises: InvalidRequest for a schema that is none.
    """
    if params.json is not None:
        try:
            return _json_source(_schema(params.json), language)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidRequest.of(params.path, f"is no JSON schema: {error}") from error
    if params.json_object is not None:
        return _json_source({"type": "object"}, language)
    if params.regex is not None:
        return str(language.grammar_from_regex(params.regex))
    if params.grammar is not None:
        return str(language.grammar_from_lark(params.grammar))
    assert params.choice is not None
    # Strings of Lark are those of JSON.
    return str(language.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice))))


def _json_source(schema: Any, language: "type[LLMatcher]") -> str:
    """Args: schema: plain JSON values, so that the text of them keeps its place in the larger one it goes into."""
    defaults: JsonCompileOptions | None = None
    if isinstance(schema, dict):
        options = schema.get("x-guidance")
        if not (isinstance(options, dict) and "whitespace_flexible" in options):  # which a pattern would overrule
            defaults = {"whitespace_pattern": WHITESPACE}
    return str(language.grammar_from_json_schema(json.dumps(schema), defaults=defaults))


def _schema(schema: str | Mapping[str, Any] | bool) -> Any:
    """The schema as plain JSON values. Raises: ValueError, TypeError, RecursionError."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")
