"""Constraints in the language that they are compiled from."""

import json
from typing import TYPE_CHECKING, Any, NoReturn

from server.errors import InvalidRequest
from server.guidance.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher


def grammar_source(params: StructuredOutputsParams, language: "type[LLMatcher]") -> str:
    """The constraint as llguidance's own format; equal texts mean equal grammars.

    Raises: InvalidRequest for a schema that is no JSON.
    """
    if params.json is not None:
        return str(language.grammar_from_json_schema(_schema_text(params)))
    if params.json_object is not None:
        return str(language.grammar_from_json_schema('{"type":"object"}'))
    if params.regex is not None:
        return str(language.grammar_from_regex(params.regex))
    if params.grammar is not None:
        return str(language.grammar_from_lark(params.grammar))
    assert params.choice is not None
    # Strings of Lark are those of JSON.
    return str(language.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice))))


def _schema_text(params: StructuredOutputsParams) -> str:
    """The schema, read and written again: it goes into a larger JSON text, where it must not break out of its place."""
    schema: Any = params.json
    try:
        if isinstance(schema, str):
            schema = json.loads(schema, parse_constant=_refuse_constant)
        return json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest.of(params.path, f"is no JSON: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")
