"""Requests that are handed on and gone on with, between a client and a scripted engine."""

from collections.abc import AsyncIterator

import grpc
import pytest

from clients.channel import CHANNEL_OPTIONS
from clients.errors import InvalidRequestError, OutriderClientError, WrongRoleError, error_from_rpc
from protos.outrider.v1 import disaggregation_pb2
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1.inference_pb2_grpc import InferenceStub
from server.engine.protocol import Finished, FinishReason, SpeculationStats, Started, StreamEvent, Timing
from server.kv_handle import ChoiceState, Continuation, KVHandle
from server.kv_transfer_config import Role
from server.request import Request
from server.tokenizer import Tokenizer
from tests.fakes.front import running_front, tiny_model_info
from tests.fakes.scripted_engine import ScriptedEngine

SOURCE = KVHandle("tcp", "engine", "127.0.0.1:7000", "lease", 16, (4,), 16, "ab")
PROMPT = pb.TokenIds(ids=range(5, 25))


async def handing_on(request: Request) -> AsyncIterator[StreamEvent]:
    yield Started(request.request_id, len(request.prompt_token_ids), 0, request.prompt_token_ids)
    for index in range(request.sampling.n):
        state = ChoiceState((70 + index,), 11, 1)
        yield Finished(
            index, FinishReason.HANDED_ON, None, 20, 1, 0, Timing(), SpeculationStats(), handed_on=state, source=SOURCE
        )


async def generate(target: str, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    async with grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        try:
            return [message async for message in InferenceStub(channel).Generate(request)]
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error


async def refusal(target: str, request: pb.GenerateRequest) -> OutriderClientError:
    with pytest.raises(OutriderClientError) as caught:
        await generate(target, request)
    return caught.value


def handed_on(role: Role) -> pb.GenerateRequest:
    text = "The brown dog jumps over the lazy dog, and so does the fox"
    return pb.GenerateRequest(text=text, hand_on=role == "both", sampling=pb.SamplingParams(n=2))


@pytest.mark.parametrize("role", ["prefill", "both"])
async def test_a_request_is_handed_on_and_gone_on_with(role: Role, tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tiny_model_info(), handing_on)
    async with running_front(engine, tokenizer, role=role) as front:
        started, *ends = await generate(front.target, handed_on(role))
    assert engine.submitted[0].hands_on
    prompt = tuple(started.started.prompt_token_ids)
    assert prompt == engine.submitted[0].prompt_token_ids
    choices = [end.finished.handed_on for end in ends]

    engine = ScriptedEngine(tiny_model_info())
    continuation = disaggregation_pb2.Continuation(choices=choices, source=ends[0].finished.source)
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        continuation=continuation,
        sampling=pb.SamplingParams(n=2, max_tokens=3, prompt_logprobs=1),
    )
    async with running_front(engine, tokenizer, role="decode") as front:
        await generate(front.target, request)
    [gone_on] = engine.submitted
    assert not gone_on.hands_on
    assert gone_on.continuation == Continuation((ChoiceState((70,), 11, 1), ChoiceState((71,), 11, 1)), SOURCE)
    assert gone_on.sampling.prompt_logprobs is None, "they were reported where it began"


async def test_each_role_does_its_part_alone(tokenizer: Tokenizer) -> None:
    begins = pb.GenerateRequest(token_ids=PROMPT, hand_on=True)
    goes_on = pb.GenerateRequest(
        token_ids=PROMPT,
        continuation=disaggregation_pb2.Continuation(choices=[disaggregation_pb2.ChoiceState(token_ids=[70])]),
    )
    engine = ScriptedEngine(tiny_model_info())
    async with running_front(engine, tokenizer, role="decode") as front:
        error = await refusal(front.target, begins)
        assert await generate(front.target, pb.GenerateRequest(token_ids=PROMPT, sampling={"max_tokens": 1}))
    assert isinstance(error, WrongRoleError)
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION
    assert "role decode" in str(error)
    async with running_front(engine, tokenizer, role="prefill") as front:
        error = await refusal(front.target, goes_on)
    assert isinstance(error, WrongRoleError)
    assert "role prefill" in str(error)
    assert [request.hands_on for request in engine.submitted] == [False]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hand_on": True}, "hand_on"),
        ({"sampling": {"n": 2}}, "continuation.choices"),
        ({"sampling": {"max_tokens": 1}}, "continuation.choices[0].token_ids"),
        ({"continuation": {"choices": [{"token_ids": [512]}]}}, "continuation.choices[0].token_ids[0]"),
        (
            {"continuation": {"choices": [{"token_ids": [70]}], "source": {"num_tokens": 32, "block_size": 16}}},
            "continuation.source.num_tokens",
        ),
        (
            {"continuation": {"choices": [{"token_ids": [70]}], "source": {"address": "x" * 513}}},
            "continuation.source.address",
        ),
    ],
)
async def test_what_cannot_be_gone_on_with_is_refused_by_name(
    change: dict[str, object], field: str, tokenizer: Tokenizer
) -> None:
    values = {"token_ids": PROMPT, "continuation": {"choices": [{"token_ids": [70]}]}, **change}
    engine = ScriptedEngine(tiny_model_info())
    async with running_front(engine, tokenizer) as front:
        error = await refusal(front.target, pb.GenerateRequest(**values))  # type: ignore[arg-type]
    assert isinstance(error, InvalidRequestError)
    assert [violation.field for violation in error.violations] == [field]
    assert not engine.submitted
