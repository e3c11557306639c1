"""Guided decoding through the wire, the command and the offline API."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from clients.errors import InvalidRequestError
from clients.requests import GenerateOptions
from server.guidance.params import StructuredOutputsParams
from server.llm import LLM
from server.request import SamplingParams
from tests.fakes.front import Front
from tests.fakes.served_model import served_model
from tests.tiny_model import build_tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("guided-rpc"))


async def ask_each(front: Front) -> list[str]:
    """The answer to each kind of constraint."""
    generate = front.client.generate
    calls = [
        generate("one", json_schema=SCHEMA, temperature=0.0, max_tokens=60),
        generate("two", json_schema=json.dumps(SCHEMA), seed=1, max_tokens=60),
        generate("three", regex="(ab|cd){2,5}", max_tokens=60),
        generate("four", grammar='start: "<" WORD ">"\nWORD: /[a-z]{1,5}/', max_tokens=60),
        generate("five", choice=["yes", "no"], max_tokens=60),
    ]
    results = await asyncio.gather(*calls)
    assert [result.choices[0].finished.finish_reason for result in results] == ["stop"] * len(calls)
    return [result.text for result in results]


async def test_each_constraint_through_the_wire(folder: Path) -> None:
    async with served_model(folder) as front:
        first, second, *others = await ask_each(front)
        for text in (first, second):
            assert json.loads(text)["a"] in range(100)
            assert json.loads(text)["b"] in ("x", "y")
        for text, pattern in zip(others, ("(ab|cd){2,5}", "<[a-z]{1,5}>", "yes|no"), strict=True):
            assert re.fullmatch(pattern, text)


BAD: tuple[tuple[GenerateOptions, str, str], ...] = (
    ({"json_schema": '{"type": "strin"}'}, "json_schema", "Invalid type: strin"),
    ({"json_object": False}, "json_object", "must be true"),
    ({"regex": "(a"}, "regex", "unclosed group"),
    ({"choice": []}, "choice", "must have 1 to"),
)


async def test_a_bad_grammar_fails_its_request_alone(folder: Path) -> None:
    async with served_model(folder) as front:
        streaming = front.client.generate("on and on", max_tokens=150, ignore_eos=True)
        deltas = aiter(streaming)
        num_tokens = len((await anext(deltas)).token_ids)
        for options, field, words in BAD:
            with pytest.raises(InvalidRequestError, match=re.escape(words)) as caught:
                await front.client.generate("one", **options)
            assert [violation.field for violation in caught.value.violations] == [f"sampling.{field}"]
        assert not streaming.finished
        async for delta in deltas:
            num_tokens += len(delta.token_ids)
        assert num_tokens == 150


def test_the_offline_api(folder: Path) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA), max_tokens=60, temperature=0)
    with LLM(str(folder), device="cpu", dtype="float32", kv_cache_memory_bytes=4 << 20) as llm:
        guided, free = llm.generate(["one", "one"], [params, SamplingParams(max_tokens=5, ignore_eos=True)])
    assert json.loads(guided.outputs[0].text)["b"] in ("x", "y")
    assert len(free.outputs[0].token_ids) == 5
