"""Presence rules of the wire contract."""

import math
from typing import Any

import pytest

from protos.outrider.v1 import disaggregation_pb2, logprobs_pb2
from protos.outrider.v1 import inference_pb2 as pb
from server.engine.protocol import Finished, FinishReason, SpeculationStats, Timing
from server.errors import InvalidRequest
from server.guidance.params import StructuredOutputsParams
from server.kv_handle import ChoiceState, Continuation, KVHandle
from server.preprocess import ChatPrompt, TextPrompt, TokensPrompt
from server.request import SamplingParams, SpeculationOptions
from server.rpc.convert import (
    continuation_from_proto,
    prompt_from_proto,
    sampling_from_proto,
    speculation_from_proto,
)
from server.rpc.responses import finished_to_proto
from server.token_logprobs import PositionLogprobs, TokenLogprob

FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


def test_unset_fields_follow_the_model_then_the_contract() -> None:
    sampling = sampling_from_proto(pb.SamplingParams(), {"temperature": 0.6, "top_k": 20, "max_tokens": 9})
    assert sampling == SamplingParams(temperature=0.6, top_k=20, max_tokens=None)


def test_set_fields_go_before_the_model_even_at_zero() -> None:
    message = pb.SamplingParams(temperature=0.0, top_k=0, min_p=0.0, skip_special_tokens=False)
    defaults = {"temperature": 0.6, "top_k": 20, "min_p": 0.1}
    assert sampling_from_proto(message, defaults) == SamplingParams(
        temperature=0.0, top_k=0, min_p=0.0, skip_special_tokens=False, max_tokens=None
    )


def test_every_field_arrives() -> None:
    """Each field of the message, set to something else than its default, changes the parameters."""
    message = pb.SamplingParams(
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        frequency_penalty=-1.0,
        presence_penalty=2.0,
        logit_bias={3: -1.5},
        bad_words=["no"],
        allowed_token_ids=pb.TokenIds(ids=[1, 2]),
        seed=-(2**63),
        n=3,
        max_tokens=7,
        min_tokens=2,
        stop=["end", "."],
        stop_token_ids=[8],
        include_stop_str_in_output=True,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=64,
        skip_special_tokens=False,
    )
    constraints = {field.name for field in message.DESCRIPTOR.oneofs_by_name["constraint"].fields}  # one at a time
    set_fields = {field.name for field, _ in message.ListFields()}
    assert set_fields | constraints == {field.name for field in message.DESCRIPTOR.fields}
    assert sampling_from_proto(message, {}) == SamplingParams(
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        frequency_penalty=-1.0,
        presence_penalty=2.0,
        logit_bias={3: -1.5},
        bad_words=("no",),
        allowed_token_ids=(1, 2),
        seed=-(2**63),
        n=3,
        max_tokens=7,
        min_tokens=2,
        stop=("end", "."),
        stop_token_ids=(8,),
        include_stop_str_in_output=True,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=64,
        skip_special_tokens=False,
    )


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (pb.SamplingParams(json_schema="{}"), StructuredOutputsParams(json="{}")),
        (pb.SamplingParams(json_object=True), StructuredOutputsParams(json_object=True)),
        (pb.SamplingParams(regex="a*"), StructuredOutputsParams(regex="a*")),
        (pb.SamplingParams(grammar="start: /a/"), StructuredOutputsParams(grammar="start: /a/")),
        (
            pb.SamplingParams(choice=pb.ChoiceConstraint(choices=["x", ""])),
            StructuredOutputsParams(choice=("x", "")),
        ),
    ],
)
def test_every_constraint_arrives(message: pb.SamplingParams, expected: StructuredOutputsParams) -> None:
    assert sampling_from_proto(message, {}).structured_outputs == expected


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.SamplingParams(json_object=False), "sampling.json_object"),
        (pb.SamplingParams(choice=pb.ChoiceConstraint()), "sampling.choice"),
        (pb.SamplingParams(regex=""), "sampling.regex"),
        (pb.SamplingParams(grammar=""), "sampling.grammar"),
        (pb.SamplingParams(json_schema=""), "sampling.json_schema"),
    ],
)
def test_constraints_that_say_nothing_are_refused(message: pb.SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling_from_proto(message, {})
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_float_may_be_other_than_finite(name: str, value: float) -> None:
    message = pb.SamplingParams()
    setattr(message, name, value)
    with pytest.raises(InvalidRequest) as caught:
        sampling_from_proto(message, {})
    assert [violation.field for violation in caught.value.violations] == [f"sampling.{name}"]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38])
def test_no_bias_may_be_other_than_small(value: float) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.logit_bias\[5\]"):
        sampling_from_proto(pb.SamplingParams(logit_bias={5: value}), {})


@pytest.mark.parametrize(("value", "is_greedy"), [(-0.0, True), (1e38, False)])
def test_extreme_temperatures_are_taken(value: float, is_greedy: bool) -> None:
    assert sampling_from_proto(pb.SamplingParams(temperature=value), {}).is_greedy is is_greedy


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1e38}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"allowed_token_ids": pb.TokenIds()}, "allowed_token_ids"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"n": 2**32 - 1}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"stop": ["."] * 65}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"logprobs": 65}, "logprobs"),
        ({"prompt_logprobs": 2**32 - 1}, "prompt_logprobs"),
    ],
)
def test_values_out_of_range_name_their_field(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling_from_proto(pb.SamplingParams(**values), {})
    assert [violation.field for violation in caught.value.violations] == [f"sampling.{field}"]


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_seeds_may_be_extreme(seed: int) -> None:
    assert sampling_from_proto(pb.SamplingParams(seed=seed), {}).seed == seed


def test_prompts() -> None:
    assert prompt_from_proto(pb.GenerateRequest(text="")) == TextPrompt("")
    tokens = prompt_from_proto(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[4, 5])))
    assert isinstance(tokens, TokensPrompt)
    assert list(tokens.token_ids) == [4, 5]
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    assert prompt_from_proto(pb.TokenizeRequest(chat=chat)) == ChatPrompt([("user", "hi")])
    with pytest.raises(InvalidRequest, match="prompt: must be set"):
        prompt_from_proto(pb.GenerateRequest())


def test_speculation_presence() -> None:
    assert speculation_from_proto(pb.SpeculationOptions()) == SpeculationOptions()
    assert speculation_from_proto(pb.SpeculationOptions(enabled=False, num_speculative_tokens=0)) == SpeculationOptions(
        enabled=False, num_speculative_tokens=0
    )
    detailed = pb.SpeculationOptions(metrics=pb.SPECULATION_METRICS_DETAILED)
    assert speculation_from_proto(detailed) == SpeculationOptions(metrics="detailed")
    unknown = pb.SpeculationOptions()
    unknown.MergeFromString(b"\x18\x07")  # field 3, of a newer client
    with pytest.raises(InvalidRequest, match=r"speculation\.metrics: must be SUMMARY \(1\) or DETAILED \(2\), got 7"):
        speculation_from_proto(unknown)


def test_what_is_handed_on_comes_back_as_it_was() -> None:
    state = ChoiceState(
        (5, 6), 2**63 - 1, 1, (PositionLogprobs(TokenLogprob(6, -0.5, 2), (TokenLogprob(4, -0.25, 1),)),)
    )
    source = KVHandle("tcp", "engine", "127.0.0.1:7000", "lease", 32, (4, 2**32 - 1), 16, "ab")
    response = finished_to_proto(
        Finished(0, FinishReason.HANDED_ON, None, 40, 2, 0, Timing(), SpeculationStats(), state, source)
    ).finished
    assert response.finish_reason == pb.FINISH_REASON_HANDED_ON
    continuation = disaggregation_pb2.Continuation(
        choices=[disaggregation_pb2.ChoiceState(ended=True), response.handed_on], source=response.source
    )
    request = pb.GenerateRequest(continuation=continuation)
    assert continuation_from_proto(request) == Continuation((None, state), source)


def test_without_a_source_nothing_is_held() -> None:
    assert continuation_from_proto(pb.GenerateRequest()) is None
    request = pb.GenerateRequest(
        continuation=disaggregation_pb2.Continuation(choices=[disaggregation_pb2.ChoiceState(token_ids=[5])])
    )
    assert continuation_from_proto(request) == Continuation((ChoiceState((5,), None),), None)


def test_lists_that_no_node_makes_are_refused_before_they_are_copied() -> None:
    choices = disaggregation_pb2.Continuation(choices=[disaggregation_pb2.ChoiceState(token_ids=[5])] * 65)
    with pytest.raises(InvalidRequest, match=r"continuation\.choices: at most 64, got 65"):
        continuation_from_proto(pb.GenerateRequest(continuation=choices))
    likeliest = disaggregation_pb2.ChoiceState(
        token_ids=[5], logprobs=[logprobs_pb2.PositionLogprobs(top=[logprobs_pb2.TokenLogprob()] * 65)]
    )
    with pytest.raises(InvalidRequest, match=r"continuation.choices\[0\].logprobs\[0\].top: at most 64"):
        continuation_from_proto(pb.GenerateRequest(continuation=disaggregation_pb2.Continuation(choices=[likeliest])))
