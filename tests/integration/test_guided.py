"""Outputs that follow a grammar, whatever drafts for them."""

import json
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from proposers.base import HostProposer, Proposer
from server.errors import InvalidRequest
from server.guidance.params import StructuredOutputsParams
from server.request import SamplingParams
from tests.fakes.drawing_proposer import DrawingProposer
from tests.fakes.engine_under_test import Answer, Outcome, engine_on, ngram
from tests.fakes.scripted_host_proposer import ScriptedHostProposer
from tests.fakes.scripted_proposer import ScriptedProposer
from tests.tiny_model import build_tiny_model

VOCAB = 512
EOS = 2
MAX_TOKENS = 48
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = r"(the|dog)( (quick|brown) fox){1,4}[.!]"
GRAMMAR = 'start: sum\nsum: NUMBER ("+" NUMBER)* "=" NUMBER\nNUMBER: /[0-9]{1,3}/'
CHOICES = ["the quick brown fox", "the lazy dog", "dog", "日本語 😀", '"quoted"\n']


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        list(person) == ["name", "age", "tags"]
        and isinstance(person["name"], str)
        and len(person["name"]) <= 6
        and type(person["age"]) is int
        and 0 <= person["age"] <= 130
        and len(person["tags"]) <= 2
        and set(person["tags"]) <= {"a", "b", None}
    )


CONSTRAINTS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json": ({"json": PERSON}, is_person),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text) is not None),
    "grammar": ({"grammar": GRAMMAR}, lambda text: re.fullmatch(r"\d{1,3}(\+\d{1,3})*=\d{1,3}", text) is not None),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
}


def guided(kind: str, **sampling: Any) -> SamplingParams:
    constraint = StructuredOutputsParams(**CONSTRAINTS[kind][0])
    return SamplingParams(structured_outputs=constraint, **{"max_tokens": MAX_TOKENS, **sampling})


def count_valid(kinds: list[str], outcomes: list[Outcome]) -> int:
    """How many answers have ended by EOS, all of which must be valid."""
    num_ended = 0
    for kind, outcome in zip(kinds, outcomes, strict=True):
        assert outcome.error is None
        for answer in outcome.choices:
            if answer.end.finish_reason.value == "stop":
                assert CONSTRAINTS[kind][1](answer.text), (kind, answer.text)
                assert answer.end.stop_reason == EOS
                num_ended += 1
    return num_ended


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("guided"))


def prompts_for(num: int) -> list[list[int]]:
    """Prompts whose first tokens differ."""
    rng = random.Random(0)
    return [[10 + first, *(rng.randrange(3, 400) for _ in range(rng.randint(1, 20)))] for first in range(num)]


SUFFIX: dict[str, object] = {"method": "suffix"}
LAYER_SKIP: dict[str, object] = {"method": "layer_skip", "num_layers": 1, "num_speculative_tokens": 4}
CONFIGS: dict[str, object] = {
    "block": ngram(4) | {"rejection_sample_method": "block"},
    "layer_skip": LAYER_SKIP,
    "layer_skip, ngram": [LAYER_SKIP, ngram(2)],
}


@pytest.mark.parametrize(
    ("proposer", "k", "depth"),
    [
        ("ngram", 1, 1),
        ("ngram", 8, 0),
        ("drawing", 3, 0),
        ("drawing", 8, 1),
        ("suffix", 5, 1),
        ("suffix, layer_skip", 2, 1),
        *(pytest.param(name, k, 1, marks=pytest.mark.full) for name in ("ngram", "drawing") for k in range(1, 9)),
    ],
)
def test_what_ends_is_valid(folder: Path, device_name: str, proposer: str, k: int, depth: int) -> None:
    """At temperature 1, half of them without a seed; beside others, with arrivals in between."""
    kinds = list(CONSTRAINTS) * 8
    params = [guided(kind, seed=None if i % 2 else i, n=1 + i % 2) for i, kind in enumerate(kinds)]
    configs: Mapping[str, Any] = {
        "ngram": ngram(k),
        "suffix": SUFFIX | {"num_speculative_tokens": k},
        "suffix, layer_skip": [SUFFIX | {"num_speculative_tokens": k}, LAYER_SKIP],
    }
    drawing = DrawingProposer(k, VOCAB, range(3, 300), device_name) if proposer == "drawing" else None
    settings: dict[str, Any] = {"pipeline_depth": depth, "max_num_seqs": 8}
    if drawing is None:
        settings["speculative_config"] = configs[proposer]
    free = SamplingParams(max_tokens=20, ignore_eos=True)
    with engine_on(folder, device_name, proposer=drawing, **settings) as engine:
        prompts = prompts_for(len(kinds) + 4)
        outcomes = engine.generate(prompts, [*params, *[free] * 4], arrivals=random.Random(depth))
        statistics = engine.statistics()
    assert count_valid(kinds, outcomes[: len(kinds)]) > len(kinds) / 2
    assert [len(outcome.only.token_ids) for outcome in outcomes[len(kinds) :]] == [20] * 4
    assert sum(statistics.accepted_tokens_per_position) > 0


EXTRAS: dict[str, dict[str, Any]] = {
    "none": {},
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 1.0},
    "narrow": {"top_k": 3, "top_p": 0.7, "min_p": 0.01},
    "logprobs": {"logprobs": 2},
    "stop": {"stop": ["o", "3"]},
    "n": {"n": 3},
    "min_tokens": {"min_tokens": 12},
    "ignore_eos": {"ignore_eos": True},
    "bias": {"logit_bias": {EOS: -100.0, 5: 3.0}, "bad_words": ["fox"]},
}


def requests() -> list[tuple[str, SamplingParams]]:
    """Constraints with each of the other parameters, greedy and seeded."""
    return [
        (kind, guided(kind, **extra, **base))
        for kind in ("json", "regex", "choice")
        for extra in EXTRAS.values()
        for base in ({"temperature": 0}, {"seed": 5})
    ]


@pytest.fixture(scope="module")
def expected(folder: Path, device_name: str) -> list[list[Answer]]:
    """The choices of every request, without speculation."""
    params = [sampling for _, sampling in requests()]
    with engine_on(folder, device_name) as engine:
        outcomes = engine.generate(prompts_for(len(params)), params)
    return [outcome.choices for outcome in outcomes]


def proposer_for(name: str, texts: list[list[int]], device: str) -> Proposer | HostProposer | None:
    match name:
        case "scripted":
            return ScriptedProposer(4, texts, error_rate=0.2)
        case "scripted host":
            return ScriptedHostProposer(4, texts)
        case "drawing":
            return DrawingProposer(4, VOCAB, range(3, 300), device)
    return None


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("scripted", 0),
        ("scripted", 1),
        ("scripted host", 1),
        ("drawing", 1),
        ("block", 1),
        ("layer_skip", 0),
        ("layer_skip, ngram", 1),
    ],
)
def test_answers_equal_those_without_speculation(
    folder: Path, expected: list[list[Answer]], device_name: str, name: str, depth: int
) -> None:
    prompts, params = prompts_for(len(expected)), [sampling for _, sampling in requests()]
    texts = [prompt + choices[0].token_ids for prompt, choices in zip(prompts, expected, strict=True)]
    settings: dict[str, Any] = {"pipeline_depth": depth}
    proposer = proposer_for(name, texts, device_name)
    if proposer is None:
        settings["speculative_config"] = CONFIGS[name]
    with engine_on(folder, device_name, proposer=proposer, **settings) as engine:
        outcomes = engine.generate(prompts, params, arrivals=random.Random(depth))
        statistics = engine.statistics()
    for choices, outcome in zip(expected, outcomes, strict=True):
        assert outcome.error is None
        assert [choice.token_ids for choice in outcome.choices] == [choice.token_ids for choice in choices]
        assert [choice.text for choice in outcome.choices] == [choice.text for choice in choices]
        assert [choice.end.stop_reason for choice in outcome.choices] == [c.end.stop_reason for c in choices]
    if name.startswith("scripted"):
        assert all(accepted > 20 for accepted in statistics.accepted_tokens_per_position)


def test_other_parameters_act_within_the_grammar(expected: list[list[Answer]]) -> None:
    """Equality with speculation is worth little if a parameter did nothing, or undid the grammar."""
    by_name: dict[str, list[tuple[str, Answer]]] = {name: [] for name in EXTRAS}
    names = [name for _ in ("json", "regex", "choice") for name in EXTRAS for _ in ("greedy", "seeded")]
    for (kind, _), name, choices in zip(requests(), names, expected, strict=True):
        by_name[name] += [(kind, choice) for choice in choices]
    for name, answers in by_name.items():
        ended = [(kind, answer) for kind, answer in answers if answer.end.stop_reason == EOS]
        assert all(CONSTRAINTS[kind][1](answer.text) for kind, answer in ended), name
        assert ended or name == "stop"
    assert {answer.end.stop_reason for _, answer in by_name["stop"]} & {"o", "3"}
    assert all(len(answer.logprobs) == len(answer.token_ids) for _, answer in by_name["logprobs"])
    shortest = min(len(answer.token_ids) for kind, answer in by_name["min_tokens"] if kind == "json")
    assert shortest > 12
    # A choice has nothing left at its end: it ends in spite of a minimum that it is too short for.
    ends = [answer for kind, answer in by_name["min_tokens"] if kind == "choice" and answer.text == "dog"]
    assert all(answer.token_ids[-1] == EOS for answer in ends)


def test_a_preempted_sequence_goes_on_in_its_grammar(folder: Path, device_name: str) -> None:
    params = [guided("json", temperature=0), guided("regex", seed=1)] * 6
    prompts = prompts_for(len(params))
    with engine_on(folder, device_name) as engine:
        answers = [outcome.only.token_ids for outcome in engine.generate(prompts, params)]
    block_nbytes = 2 * 2 * 2 * 16 * 4 * 16  # layers, KV heads, K and V, head size, bytes, tokens
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 8 * block_nbytes, "watermark": 0.0, "max_model_len": 96}
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    proposer = ScriptedProposer(3, texts, error_rate=0.2)
    with engine_on(folder, device_name, proposer=proposer, pipeline_depth=1, **settings) as engine:
        outcomes = engine.generate(prompts, params)
        assert engine.statistics().num_preemptions > 0
    assert [outcome.only.token_ids for outcome in outcomes] == answers


def test_a_grammar_that_becomes_too_complex_fails_its_request_alone(
    folder: Path, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.guidance.compiler.MAX_LEXER_STATES", 60)
    complex_one = StructuredOutputsParams(regex="[a-z](.*a.{40}b)")
    params = [
        SamplingParams(structured_outputs=complex_one, max_tokens=40, seed=1),
        guided("choice", temperature=0),
        SamplingParams(max_tokens=20, ignore_eos=True, seed=1),
    ]
    with engine_on(folder, device_name, pipeline_depth=1, speculative_config=ngram(3)) as engine:
        failed, *others = engine.generate(prompts_for(3), params)
    assert isinstance(failed.error, InvalidRequest)
    assert "too many states" in str(failed.error)
    assert others[0].only.text in CHOICES
    assert len(others[1].only.token_ids) == 20


def test_a_grammar_and_other_rules_that_exclude_each_other(folder: Path, device_name: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]+"), allowed_token_ids=[300])
    with engine_on(folder, device_name) as engine:
        outcome = engine.generate([[5]], params)[0]
    assert isinstance(outcome.error, InvalidRequest)
    assert "leave no token" in str(outcome.error)
