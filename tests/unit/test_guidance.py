"""Constraints become grammars, and what is wrong with one is said of its field."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from server.errors import InvalidRequest
from server.guidance.compiler import GrammarCompiler
from server.guidance.grammar import Grammar
from server.guidance.params import MAX_CONSTRAINT_CHARS, MAX_TEXTS, StructuredOutputsParams
from server.model.no_tokenizer import NoTokenizer
from server.request import SamplingParams
from server.tokenizer import Tokenizer
from tests.fakes.tokenizers import tiny_tokenizer

VOCAB = 512
EOS = 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=[EOS])


def follows(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is one of the grammar's, as a whole."""
    matcher = grammar.start()
    matcher.advance([*tokenizer.encode(text, add_special_tokens=False), EOS])
    return matcher.error() is None


NASTY_TEXTS = [
    "yes",
    "no",
    'a"b',
    "a\\b",
    "new\nline",
    "tab\t",
    "é 日本 😀",
    "/re/",
    "\x01\x7f",
    "\u2028",
    "[a-z]+",
    "",
]


@pytest.mark.parametrize(
    ("constraint", "inside", "outside"),
    [
        (
            {"json": PERSON},
            ['{"name": "A\\n😀", "age": 3}', '{ "name":"","age":-1 }'],
            ['{"name": "A"}', "{}", "[]", ""],
        ),
        ({"json": json.dumps(PERSON)}, ['{"name": "A", "age": 3}'], ['{"age": 3}', '{"name": "A", "age": 3} ']),
        ({"json": "true"}, ["1", '[{"a": []}]'], ["", "a"]),
        ({"json": True}, ["1", '[{"a": []}]'], ["", "a"]),
        ({"json": {"type": "array"}}, ["[" + " " * 40 + "]"], ["[" + " " * 41 + "]"]),
        (
            {"json": {"type": "array", "x-guidance": {"whitespace_pattern": " +"}}},
            ["[" + " " * 41 + "]"],
            ["[\n]"],
        ),
        ({"json": {"type": "array", "x-guidance": {"whitespace_flexible": False}}}, ["[1]"], ["[ 1]"]),
        ({"json": {"enum": ["x", 1, None]}}, ['"x"', "1", "null"], ["x", "2"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '"x"', "{"]),
        ({"regex": r"(foo|ba+r)[0-9]{2,4}"}, ["foo12", "baaar0123"], ["foo", "foo1", "foo12345", "xfoo12"]),
        ({"grammar": 'start: "a" item+\nitem: "(" item* ")"'}, ["a()", "a(())()"], ["a", "a(", "()"]),
        ({"regex": " "}, [" "], ["", "  "]),
        ({"choice": NASTY_TEXTS}, NASTY_TEXTS, ["maybe", "ye", "yesno", "a", "tab"]),
    ],
)
def test_texts_inside_and_outside(
    compiler: GrammarCompiler, tokenizer: Tokenizer, constraint: dict[str, Any], inside: list[str], outside: list[str]
) -> None:
    grammar = compiler.compile(StructuredOutputsParams(**constraint))
    assert [text for text in inside if not follows(grammar, tokenizer, text)] == []
    assert [text for text in outside if follows(grammar, tokenizer, text)] == []


@pytest.mark.parametrize(
    ("constraint", "field", "words"),
    [
        ({}, "constraint", "exactly one of json_schema, json_object, regex, grammar, choice, got []"),
        ({"regex": "a", "json_object": True}, "constraint", "got ['json_object', 'regex']"),
        ({"json_object": False}, "json_object", "must be true"),
        ({"json_object": "yes"}, "json_object", "must be true if it is given, got 'yes'"),
        ({"choice": []}, "choice", "must have 1 to"),
        ({"choice": "yes"}, "choice", "must be a list of texts, got 'yes'"),
        ({"choice": ["yes", 1]}, "choice", "must be a list of texts, got ['yes', 1]"),
        ({"regex": 3}, "regex", "must be text, got 3"),
        ({"choice": ["", ""]}, "choice", "must not be empty"),
        ({"regex": ""}, "regex", "must not be empty"),
        ({"regex": "\ud800"}, "regex", "must be valid Unicode"),
        ({"choice": ["a", "\ud800"]}, "choice", "must be valid Unicode"),
        ({"grammar": ""}, "grammar", "must not be empty"),
        ({"json": ""}, "json_schema", "must not be empty"),
        ({"choice": ["x"] * (MAX_TEXTS + 1)}, "choice", "must have 1 to"),
        ({"choice": ["x" * MAX_CONSTRAINT_CHARS, "y"]}, "choice", f"at most {MAX_CONSTRAINT_CHARS} characters"),
        ({"regex": "x" * (MAX_CONSTRAINT_CHARS + 1)}, "regex", "at most"),
    ],
)
def test_constraints_that_are_none(constraint: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)) as caught:
        StructuredOutputsParams(**constraint)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_a_mapping_is_no_constraint() -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs: must be a StructuredOutputsParams, got "):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("constraint", "field", "words"),
    [
        ({"json": "{"}, "json_schema", "is no JSON schema"),
        ({"json": "false"}, "json_schema", "schema is false"),
        ({"json": "{}}, {}"}, "json_schema", "is no JSON schema"),
        ({"json": '{"const": NaN}'}, "json_schema", "NaN is not allowed"),
        ({"json": "[" * 100_000}, "json_schema", "is no JSON schema"),
        ({"json": {"const": {1}}}, "json_schema", "is no JSON schema"),
        ({"json": "[1]"}, "json_schema", "schema must be an object"),
        ({"json": {"type": "strin"}}, "json_schema", "Invalid type: strin"),
        ({"json": {"not": {"type": "string"}}}, "json_schema", "Unimplemented keys"),
        ({"json": {"$ref": "http://example.com/x"}}, "json_schema", "not fetch"),
        ({"regex": "(foo"}, "regex", "unclosed group"),
        ({"grammar": "start: foo"}, "grammar", "unknown name"),
        ({"grammar": " "}, "grammar", "Empty grammar"),
        ({"grammar": "start: start"}, "grammar", "there is no text that it allows"),
    ],
)
def test_grammars_that_are_none(compiler: GrammarCompiler, constraint: dict[str, Any], field: str, words: str) -> None:
    for _ in range(2):  # the second time from the cache
        with pytest.raises(InvalidRequest, match=re.escape(words)) as caught:
            compiler.compile(StructuredOutputsParams(**constraint))
        assert [violation.field for violation in caught.value.violations] == [f"sampling.{field}"]


def test_each_choice_stands_in_a_place_of_its_own(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(StructuredOutputsParams(regex="(ab)+"))
    first, second = grammar.start(), grammar.start()
    first.advance(tokenizer.encode("aba", add_special_tokens=False))
    second.advance(tokenizer.encode("ba", add_special_tokens=False))
    assert first.error() is None
    assert second.error() is not None
    first.advance([*tokenizer.encode("b", add_special_tokens=False), EOS])
    assert first.error() is None


def test_a_text_is_compiled_once(compiler: GrammarCompiler) -> None:
    constraints = [StructuredOutputsParams(regex="once+") for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        grammars = list(pool.map(compiler.compile, constraints))
    assert len(set(map(id, grammars))) == 1


def test_only_so_many_are_kept(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.guidance.compiler.MAX_CACHED", 2)
    compiler = GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=[EOS])
    first, second = (compiler.compile(StructuredOutputsParams(regex=text)) for text in "ab")
    assert compiler.compile(StructuredOutputsParams(regex="a")) is first
    compiler.compile(StructuredOutputsParams(regex="c"))
    assert compiler.compile(StructuredOutputsParams(regex="a")) is first
    assert compiler.compile(StructuredOutputsParams(regex="b")) is not second


@pytest.mark.parametrize(
    ("eos_token_ids", "expected"), [([EOS], (EOS,)), ([0, EOS], (0, EOS)), ([], (EOS,)), ([EOS, 511], (EOS,))]
)
def test_what_ends_a_text(tokenizer: Tokenizer, eos_token_ids: list[int], expected: tuple[int, ...]) -> None:
    """The model's own, as far as the tokenizer knows them, or the tokenizer's."""
    compiler = GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=eos_token_ids)
    assert compiler.compile(StructuredOutputsParams(regex="a")).eos_token_ids == expected


def test_without_a_usable_tokenizer(tokenizer: Tokenizer) -> None:
    for broken, vocab_size, words in ((NoTokenizer(), VOCAB, "start it with --token"), (tokenizer, 100, "vocab size")):
        compiler = GrammarCompiler(broken, vocab_size=vocab_size, eos_token_ids=[EOS])
        with pytest.raises(InvalidRequest, match=words) as caught:
            compiler.compile(StructuredOutputsParams(json_object=True))
        assert caught.value.violations[0].field == "sampling.json_object"


def test_grammars_that_are_too_complex_are_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where their first mask shows it, else by the matcher that finds it out; the next one starts afresh."""
    monkeypatch.setattr("server.guidance.compiler.MAX_LEXER_STATES", 20)
    compiler = GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=[EOS])
    with pytest.raises(InvalidRequest, match=r"sampling.regex: .*too many states"):
        compiler.compile(StructuredOutputsParams(regex=".*a.{40}b"))
    later = StructuredOutputsParams(regex="x(.*a.{40}b)")
    grammar = compiler.compile(later)
    matcher = grammar.start()
    matcher.advance(tokenizer.encode("x", add_special_tokens=False))
    matcher.raw.compute_bitmask()
    error = matcher.error()
    assert error is not None
    assert "too many states" in error
    assert compiler.compile(later) is not grammar
