"""From keyword arguments to messages, and from messages to outputs."""

from collections.abc import Callable
from typing import Any

import pytest

from clients.channel import Deadline
from clients.errors import InvalidRequestError, OverloadedError, UnavailableError, UnexpectedStatusError
from clients.outputs import OutputBuilder
from clients.requests import (
    GenerateOptions,
    SamplingOptions,
    abort_request,
    detokenize_request,
    generate_request,
    tokenize_request,
)
from clients.retry import RetryPolicy
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1.logprobs_pb2 import PositionLogprobs, TokenLogprob


def test_every_sampling_parameter_is_an_option() -> None:
    assert set(SamplingOptions.__annotations__) == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}


def test_options_become_fields() -> None:
    request = generate_request(
        None,
        {
            "messages": [{"role": "user", "content": "hi"}],
            "temperature": 0.0,
            "logit_bias": {3: -1.5},
            "allowed_token_ids": [],
            "stop": "one",
            "bad_words": ["x", "y"],
            "seed": None,
            "speculation": False,
            "num_speculative_tokens": 0,
            "speculation_metrics": "detailed",
            "priority": -1,
            "request_id": "",
        },
    )
    assert request == pb.GenerateRequest(
        chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")]),
        sampling=pb.SamplingParams(
            temperature=0.0, logit_bias={3: -1.5}, allowed_token_ids=pb.TokenIds(), stop=["one"], bad_words=["x", "y"]
        ),
        speculation=pb.SpeculationOptions(
            enabled=False, num_speculative_tokens=0, metrics=pb.SPECULATION_METRICS_DETAILED
        ),
        priority=-1,
        request_id="",
    )


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"json_schema": {"type": "object"}}, pb.SamplingParams(json_schema='{"type": "object"}')),
        ({"json_schema": "{}"}, pb.SamplingParams(json_schema="{}")),
        ({"json_object": True, "regex": None}, pb.SamplingParams(json_object=True)),
        ({"regex": "a+"}, pb.SamplingParams(regex="a+")),
        ({"grammar": "start: /a/"}, pb.SamplingParams(grammar="start: /a/")),
        ({"choice": ["x", "y"]}, pb.SamplingParams(choice=pb.ChoiceConstraint(choices=["x", "y"]))),
        ({"choice": []}, pb.SamplingParams(choice=pb.ChoiceConstraint())),
    ],
)
def test_a_constraint_becomes_its_field(options: GenerateOptions, sampling: pb.SamplingParams) -> None:
    assert generate_request("", options) == pb.GenerateRequest(text="", sampling=sampling)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"regex": "a", "choice": ["a"]}, "sampling.constraint"),
        ({"json_schema": {"const": {1}}}, "sampling.json_schema"),
        ({"regex": 1}, "sampling.regex"),
        ({"choice": [1]}, "sampling.choice[0]"),
    ],
)
def test_constraints_that_cannot_be_sent_are_named(options: GenerateOptions, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        generate_request("", options)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_nothing_given_is_nothing_sent() -> None:
    assert generate_request("", {}) == pb.GenerateRequest(text="")
    assert generate_request(None, {"token_ids": []}) == pb.GenerateRequest(token_ids=pb.TokenIds())


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (None, {}, "prompt"),
        ("text", {"token_ids": [1]}, "prompt"),
        (None, {"token_ids": [-1]}, "token_ids.ids"),
        (None, {"messages": [{"role": "user"}]}, "chat.messages[0]"),
        ("text", {"max_tokens": -1}, "sampling.max_tokens"),
        ("text", {"seed": 2**63}, "sampling.seed"),
        ("text", {"temperature": "hot"}, "sampling.temperature"),
        ("text", {"logit_bias": {-1: 0.5}}, "sampling.logit_bias[-1]"),
        ("text", {"logit_bias": [1]}, "sampling.logit_bias"),
        ("text", {"stop_token_ids": [2**32]}, "sampling.stop_token_ids"),
        ("text", {"stop": ["a", 5]}, "sampling.stop[1]"),
        ("text", {"stop": 5}, "sampling.stop"),
        ("text", {"priority": 2**31}, "priority"),
        ("text", {"num_speculative_tokens": -1}, "speculation.num_speculative_tokens"),
        ("text", {"speculation_metrics": "all"}, "speculation.metrics"),
    ],
)
def test_what_the_wire_cannot_carry_names_its_field(prompt: str | None, options: GenerateOptions, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        generate_request(prompt, options)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": -1}, "speculation.num_speculative_tokens: must be from 0 to 4294967295, got -1"),
        ({"n": 1 << 32}, "sampling.n: must be from 0 to 4294967295, got 4294967296"),
        ({"priority": -(1 << 31) - 1}, "priority: must be from -2147483648 to 2147483647, got -2147483649"),
        ({"num_speculative_tokens": "3"}, "speculation.num_speculative_tokens: must be an integer, got '3'"),
        ({"num_speculative_tokens": 2.5}, "speculation.num_speculative_tokens: must be an integer, got 2.5"),
        ({"num_speculative_tokens": True}, "speculation.num_speculative_tokens: must be an integer, got True"),
        ({"speculation": "yes"}, "speculation.enabled: must be true or false, got 'yes'"),
        ({"temperature": "hot"}, "sampling.temperature: must be a number, got 'hot'"),
        ({"regex": 3}, "sampling.regex: must be text, got 3"),
        ({"bad_words": ["a", None]}, "sampling.bad_words[1]: must be text, got None"),
        ({"seed": 1 << 63}, f"sampling.seed: must be from {-(1 << 63)} to {(1 << 63) - 1}, got {1 << 63}"),
    ],
)
def test_values_that_the_wire_cannot_carry_are_told_what_it_can(options: GenerateOptions, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        generate_request("text", options)
    assert str(caught.value) == message


def test_unknown_options_are_refused() -> None:
    options: Any = {"temprature": 1.0}
    with pytest.raises(TypeError, match=r"temprature.*temperature"):
        generate_request("text", options)


def test_tokenize_takes_one_prompt() -> None:
    assert tokenize_request("text", None, False) == pb.TokenizeRequest(text="text", add_special_tokens=False)
    with pytest.raises(InvalidRequestError, match="exactly one"):
        tokenize_request(None, None, None)


def test_other_calls_name_what_the_wire_cannot_carry() -> None:
    five: Any = 5
    no: Any = "no"
    listed: Any = ["one"]
    makes: list[tuple[Callable[[], object], str]] = [
        (lambda: tokenize_request(five, None, None), "text: must be text, got 5"),
        (lambda: tokenize_request("a", None, no), "add_special_tokens: must be true or false, got 'no'"),
        (lambda: detokenize_request([-1], None), "token_ids: Value out of range: -1"),
        (lambda: detokenize_request([1], no), "skip_special_tokens: must be true or false, got 'no'"),
        (lambda: abort_request([listed]), "request_ids[0]: must be text, got ['one']"),
    ]
    for make, words in makes:
        with pytest.raises(InvalidRequestError) as caught:
            make()
        assert str(caught.value) == words
    assert detokenize_request([3], False) == pb.DetokenizeRequest(token_ids=[3], skip_special_tokens=False)
    assert abort_request(["one"]) == pb.AbortRequest(request_ids=["one"])


def test_a_time_that_is_none_is_refused_and_an_endless_one_has_no_end() -> None:
    for timeout_s in ("5", float("nan")):
        with pytest.raises(InvalidRequestError, match=r"^timeout_s: must be a number of seconds or None, got "):
            Deadline(timeout_s)  # type: ignore[arg-type]
    assert [Deadline(timeout_s).remaining_s() for timeout_s in (float("inf"), 1e12, None, -1)] == [None, None, None, 0]
    remaining_s = Deadline(60).remaining_s()
    assert remaining_s is not None
    assert 0 < remaining_s <= 60


def test_outputs_join_by_choice() -> None:
    builder = OutputBuilder()
    position = PositionLogprobs(chosen=TokenLogprob(token_id=4, logprob=-1.0, rank=2, text="x"))
    for message in (
        pb.GenerateResponse(started=pb.Started(request_id="r", prompt_tokens=3, cached_tokens=2)),
        pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(positions=[position])),
        pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(positions=[position])),
        pb.GenerateResponse(delta=pb.Delta(index=1, text="b", token_ids=[5])),
        pb.GenerateResponse(delta=pb.Delta(index=0, text="a", token_ids=[4], logprobs=[position])),
        pb.GenerateResponse(delta=pb.Delta(index=1, text="c", token_ids=[6, 7])),
        pb.GenerateResponse(finished=pb.Finished(index=1, finish_reason=pb.FINISH_REASON_STOP, stop_token_id=0)),
    ):
        builder.add(message)
    assert list(builder.finished) == [1]
    builder.add(
        pb.GenerateResponse(finished=pb.Finished(index=0, finish_reason=pb.FINISH_REASON_STOP, stop_string="a"))
    )
    output = builder.output()
    assert [(choice.text, choice.token_ids) for choice in output.choices] == [("a", (4,)), ("bc", (5, 6, 7))]
    assert [choice.finished.stop_reason for choice in output.choices] == ["a", 0]
    assert output.choices[0].logprobs[0].chosen.rank == 2
    assert len(output.prompt_logprobs) == 2
    assert output.started is not None
    assert output.started.cached_tokens == 2


def test_retries_are_bounded_and_heed_the_hint() -> None:
    import grpc

    policy = RetryPolicy(max_attempts=3, initial_backoff_s=0.5, max_backoff_s=4)
    gone = UnavailableError("", grpc.StatusCode.UNAVAILABLE)
    assert [policy.pause_s(gone, attempts, None) for attempts in (1, 2, 3)] == [0.5, 1.0, None]
    full = OverloadedError("", grpc.StatusCode.RESOURCE_EXHAUSTED, 3.0)
    assert policy.pause_s(full, 1, None) == 3.0
    assert policy.pause_s(full, 1, 2.0) is None, "the deadline comes first"
    assert policy.pause_s(OverloadedError("", grpc.StatusCode.RESOURCE_EXHAUSTED, 60.0), 1, None) is None
    assert policy.pause_s(UnexpectedStatusError("", grpc.StatusCode.UNKNOWN), 1, None) is None


def test_text_that_is_no_unicode_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        generate_request(None, {"messages": [{"role": "user", "content": "\udcff"}]})
    assert caught.value.violations[0].field == "chat.messages[0].content"


@pytest.mark.parametrize("content", [None, 3, [{"type": "text", "text": "Hello"}]])
def test_a_messages_content_is_text(content: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        generate_request(None, {"messages": [{"role": "user", "content": content}]})
    assert str(caught.value) == f"chat.messages[0].content: must be text, got {content!r}"
