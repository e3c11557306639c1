"""What the default model says within grammars, at every number of drafts."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from server.errors import ModelError
from server.guidance.params import StructuredOutputsParams
from server.model.resolve import pull
from server.request import SamplingParams
from tests.fakes.engine_under_test import Outcome, engine_on, ngram

NUM_REQUESTS = 232
MOST_DRAFTS = 8
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "inhabitants": {"type": "integer", "minimum": 1, "maximum": 40_000_000},
        "is_capital": {"type": "boolean"},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 3},
    },
    "required": ["city", "inhabitants", "is_capital", "rivers"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
DATE = r"(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day, [0-3]?[0-9] (January|May|July) [12][0-9]{3}"
CHOICES = ["positive", "negative", "neither, as far as one can tell", "日本"]
LIST = 'start: item{1,4}\nitem: "- " WORDS "\\n"\nWORDS: /[A-Za-z]{1,12}( [a-z]{1,12}){0,4}/'


def is_city(text: str) -> bool:
    city = json.loads(text)
    return (
        list(city) == CITY["required"]
        and len(city["city"]) <= 40
        and type(city["inhabitants"]) is int
        and 1 <= city["inhabitants"] <= 40_000_000
        and type(city["is_capital"]) is bool
        and len(city["rivers"]) <= 3
        and all(len(river) <= 30 for river in city["rivers"])
    )


KINDS: list[tuple[str, dict[str, Any], Callable[[str], bool]]] = [
    ("Describe a city in JSON.", {"json": CITY}, is_city),
    ("Give me a JSON object with a short description of a cat.", {"json_object": True}, lambda text: text[0] == "{"),
    ("On which day was it?", {"regex": DATE}, lambda text: re.fullmatch(DATE, text) is not None),
    ("Is this review positive or negative? It was a nice film.", {"choice": CHOICES}, lambda text: text in CHOICES),
    (
        "List some fruits.",
        {"grammar": LIST},
        lambda text: re.fullmatch(r"(- [A-Za-z]{1,12}( [a-z]{1,12}){0,4}\n){1,4}", text) is not None,
    ),
]


def is_valid(index: int, outcome: Outcome) -> bool:
    """Whether an answer is what was asked for; raises for JSON that is none."""
    _, constraint, check = KINDS[index % len(KINDS)]
    text = outcome.only.text
    if "json_object" in constraint:
        json.loads(text)
    return check(text)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_all_of_200_answers_that_end_are_valid(device_name: str) -> None:
    """At temperature 1, with 1 to 8 drafts in one batch, beside answers that are free."""
    try:
        folder = pull("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"no default model here: {error}")
    with engine_on(
        folder,
        device_name,
        dtype="bfloat16",
        max_model_len=320,
        max_num_seqs=16,
        kv_cache_memory_bytes=256 << 20,
        pipeline_depth=1,
        speculative_config=ngram(MOST_DRAFTS, 1, 4),
    ) as engine:
        tokenizer = engine.core.preprocessor._tokenizer
        outcomes: list[Outcome] = []
        for num_drafts in range(1, MOST_DRAFTS + 1):
            indices = range(num_drafts - 1, NUM_REQUESTS, MOST_DRAFTS)
            prompts = [chat(tokenizer, KINDS[i % len(KINDS)][0]) for i in indices]
            params = [
                SamplingParams(structured_outputs=StructuredOutputsParams(**KINDS[i % len(KINDS)][1]), max_tokens=100)
                for i in indices
            ]
            outcomes += engine.generate(prompts, params, num_drafts=num_drafts)
            ended = [
                (i, outcome)
                for i, outcome in zip(indices, outcomes[-len(indices) :], strict=True)
                if outcome.only.end.finish_reason.value == "stop"
            ]
            assert [(KINDS[i % len(KINDS)][1], o.only.text) for i, o in ended if not is_valid(i, o)] == []
        assert sum(outcome.only.end.finish_reason.value == "stop" for outcome in outcomes) >= 200
        assert all(accepted > 0 for accepted in engine.statistics().accepted_tokens_per_position)


def chat(tokenizer: Any, text: str) -> list[int]:
    """A user's message as the model knows it."""
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)))
