"""Whatever a client sends becomes a Request that fits the model, or is refused by field."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.outrider.v1 import inference_pb2 as pb
from server.errors import InvalidRequest
from server.preprocess import Preprocessor
from server.request import Request
from server.rpc.convert import prompt_from_proto, sampling_from_proto, speculation_from_proto
from server.rpc.status import status_of
from tests.fakes.front import tiny_model_info
from tests.fakes.tokenizers import tiny_tokenizer

INFO = tiny_model_info(generation_defaults={"temperature": 0.7, "top_k": 40, "repetition_penalty": 1.1})


def _sampling(values: dict[str, Any]) -> pb.SamplingParams:
    return pb.SamplingParams(**values)


def _speculation(values: dict[str, Any]) -> pb.SpeculationOptions:
    return pb.SpeculationOptions(**values)


uint32 = st.one_of(st.integers(0, 600), st.sampled_from([2**31 - 1, 2**31, 2**32 - 1]))
int32 = st.one_of(st.integers(-3, 600), st.sampled_from([-(2**31), 2**31 - 1]))
float32 = st.one_of(
    st.floats(width=32), st.floats(0, 2, width=32), st.sampled_from([-0.0, math.nan, math.inf, -math.inf, 1e38, 1e-45])
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)  # the wire carries no surrogates
ids = st.lists(uint32, max_size=20).map(lambda values: pb.TokenIds(ids=values))
messages = st.lists(st.builds(pb.ChatMessage, role=texts, content=texts), max_size=3)
prompts: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"text": st.one_of(texts, st.integers(0, 3000).map(lambda size: "a b" * size))}),
    st.fixed_dictionaries({"token_ids": st.one_of(ids, st.integers(395, 520).map(lambda n: pb.TokenIds(ids=[7] * n)))}),
    st.fixed_dictionaries({"chat": messages.map(lambda values: pb.ChatMessages(messages=values))}),
)
samplings = st.fixed_dictionaries(
    {},
    optional={
        "temperature": float32,
        "top_k": int32,
        "top_p": float32,
        "min_p": float32,
        "repetition_penalty": float32,
        "frequency_penalty": float32,
        "presence_penalty": float32,
        "logit_bias": st.dictionaries(uint32, float32, max_size=3),
        "bad_words": st.lists(texts, max_size=3),
        "allowed_token_ids": ids,
        "seed": st.integers(-(2**63), 2**63 - 1),
        "n": uint32,
        "max_tokens": uint32,
        "min_tokens": uint32,
        "stop": st.lists(texts, max_size=3),
        "stop_token_ids": st.lists(uint32, max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "logprobs": uint32,
        "prompt_logprobs": uint32,
        "skip_special_tokens": st.booleans(),
    },
).map(_sampling)
speculations = st.fixed_dictionaries({}, optional={"enabled": st.booleans(), "num_speculative_tokens": uint32}).map(
    _speculation
)


@pytest.fixture(scope="module")
def preprocessor(tmp_path_factory: pytest.TempPathFactory) -> Preprocessor:
    return Preprocessor(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")), INFO)


def outcome(preprocessor: Preprocessor, message: pb.GenerateRequest) -> Request | InvalidRequest:
    try:
        return preprocessor.build(
            prompt_from_proto(message),
            sampling_from_proto(message.sampling, INFO.generation_defaults),
            request_id="r",
            speculation=speculation_from_proto(message.speculation),
        )
    except InvalidRequest as error:
        return error


def refused_fields(error: InvalidRequest) -> set[str]:
    """The top-level fields that a refusal names, as a client finds them in the status."""
    _, status = status_of(error)
    assert status.details
    assert error.violations
    return {violation.field.partition("[")[0].split(".")[0] for violation in error.violations}


def check_fits(request: Request) -> None:
    prompt_len, sampling = len(request.prompt_token_ids), request.sampling
    assert sampling.max_tokens is not None
    assert 1 <= prompt_len < INFO.max_model_len
    assert 0 <= sampling.min_tokens <= sampling.max_tokens
    assert prompt_len + sampling.max_tokens <= INFO.max_request_len
    every_id = (*request.prompt_token_ids, *request.stop_token_ids, *sampling.logit_bias)
    assert all(0 <= token_id < INFO.vocab_size for token_id in (*every_id, *(sampling.allowed_token_ids or ())))
    assert all(request.bad_words_token_ids)
    floats = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
    assert all(math.isfinite(value) for value in (*floats, *sampling.logit_bias.values()))


@settings(max_examples=400)
@given(prompt=prompts, sampling=samplings, speculation=speculations)
def test_requests_fit_or_are_refused_by_field(
    preprocessor: Preprocessor, prompt: dict[str, Any], sampling: pb.SamplingParams, speculation: pb.SpeculationOptions
) -> None:
    result = outcome(preprocessor, pb.GenerateRequest(sampling=sampling, speculation=speculation, **prompt))
    if isinstance(result, InvalidRequest):
        assert refused_fields(result) <= {"prompt", *pb.GenerateRequest.DESCRIPTOR.fields_by_name}
    else:
        check_fits(result)


@settings(max_examples=100)
@given(prompt=prompts)
def test_valid_parameters_leave_only_the_prompt_to_refuse(preprocessor: Preprocessor, prompt: dict[str, Any]) -> None:
    """Most of the other test's examples are refused for their parameters; here the prompt decides."""
    result = outcome(preprocessor, pb.GenerateRequest(sampling=pb.SamplingParams(top_p=0.5, logprobs=3), **prompt))
    if isinstance(result, InvalidRequest):
        assert refused_fields(result) <= {"prompt", "text", "token_ids", "chat"}
    else:
        check_fits(result)
