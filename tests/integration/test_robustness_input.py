"""Input of every bad kind: each is refused by name, quickly, and a request beside it does not notice."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest
import pytest_asyncio

from clients.aio import AsyncClient
from clients.errors import (
    InvalidRequestError,
    MessageTooLargeError,
    OutriderClientError,
    UnexpectedStatusError,
    error_from_rpc,
)
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1.inference_pb2_grpc import InferenceStub
from tests.integration.real_server import BLOCK_SIZE, NGRAM, RealServer, real_server
from tests.tiny_model import CHAT_TEMPLATE, build_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB_SIZE, MAX_LEN = 512, 512
UINT32_MAX, INT32_MIN, INT32_MAX = 2**32 - 1, -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
NAN, INF, LARGE, DENORMAL = math.nan, math.inf, 1e38, 1e-40

REFUSED_FLOATS = {
    "temperature": (NAN, INF, -INF, -1.0),
    "top_p": (NAN, INF, -INF, 0.0, -0.0, 1.5, LARGE),
    "min_p": (NAN, INF, -INF, -0.5, 1.5, LARGE),
    "repetition_penalty": (NAN, INF, -INF, 0.0, -0.0, DENORMAL),
    "frequency_penalty": (NAN, INF, -INF, 2.5, LARGE),
    "presence_penalty": (NAN, INF, -INF, -2.5, LARGE),
}
ACCEPTED_FLOATS = {
    "temperature": (-0.0, DENORMAL, LARGE),
    "top_p": (DENORMAL, 1.0),
    "min_p": (-0.0, DENORMAL, 1.0),
    "repetition_penalty": (LARGE, 1.2e-38),
    "frequency_penalty": (-0.0, DENORMAL, 2.0),
    "presence_penalty": (-0.0, DENORMAL, -2.0),
}
REFUSED_INTEGERS = {
    "n": (0, 65, UINT32_MAX),
    "max_tokens": (0,),
    "min_tokens": (9, UINT32_MAX),
    "top_k": (-2, INT32_MIN),
    "logprobs": (65, UINT32_MAX),
    "prompt_logprobs": (65, UINT32_MAX),
}
ACCEPTED_INTEGERS = {
    "n": (1, 3),
    "top_k": (-1, 0, 1, INT32_MAX),
    "min_tokens": (0, 8),
    "logprobs": (0, 64),
    "prompt_logprobs": (0, 64),
    "seed": (INT64_MIN, -1, 0, INT64_MAX),
}


def ids(*token_ids: int) -> pb.TokenIds:
    return pb.TokenIds(ids=token_ids)


def ask(**sampling: object) -> pb.GenerateRequest:
    """A short prompt with these sampling parameters."""
    values = {"max_tokens": 8, "ignore_eos": True, **sampling}
    return pb.GenerateRequest(token_ids=ids(70, 71, 70), sampling=pb.SamplingParams(**values))  # type: ignore[arg-type]


def chat(*messages: tuple[str, str]) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages])


def refused() -> Iterator[tuple[str, pb.GenerateRequest, tuple[str, ...]]]:
    """Field, request, and what the violation's description must name."""
    yield "prompt", pb.GenerateRequest(), ()
    yield "text", pb.GenerateRequest(text=""), ()
    yield "text", pb.GenerateRequest(text="word " * 3_000_000), (str(MAX_LEN),)
    yield "token_ids.ids", pb.GenerateRequest(token_ids=pb.TokenIds()), ()
    for length in (MAX_LEN, MAX_LEN + 1):
        yield "token_ids.ids", pb.GenerateRequest(token_ids=ids(*[70] * length)), (str(length), str(MAX_LEN))
    yield "chat.messages", pb.GenerateRequest(chat=chat()), ()
    yield "chat.messages", pb.GenerateRequest(chat=chat(*[("user", "a")] * 100_000)), (str(MAX_LEN),)
    yield "chat.messages", pb.GenerateRequest(chat=chat(("user", "word " * 3_000_000))), (str(MAX_LEN),)
    yield "chat", pb.GenerateRequest(chat=chat(("forbidden", "hi"))), ("template", "no such role")
    yield "request_id", pb.GenerateRequest(text="a", request_id=""), ("256",)
    yield "request_id", pb.GenerateRequest(text="a", request_id="x" * 257), ("256", "257")
    for request_id in ("\0", "a\nb", "\u202ea"):
        yield "request_id", pb.GenerateRequest(text="a", request_id=request_id), ("control",)
    for token_id in (VOCAB_SIZE, UINT32_MAX):
        names = (str(VOCAB_SIZE),)
        yield "token_ids.ids[1]", pb.GenerateRequest(token_ids=ids(70, token_id)), (*names, str(token_id))
        yield "sampling.allowed_token_ids[0]", ask(allowed_token_ids=ids(token_id)), names
        yield "sampling.stop_token_ids[0]", ask(stop_token_ids=[token_id]), names
        yield f"sampling.logit_bias[{token_id}]", ask(logit_bias={token_id: 1.0}), names
    for values in (REFUSED_FLOATS, REFUSED_INTEGERS):
        for name, bad_values in values.items():
            for value in bad_values:
                yield f"sampling.{name}", ask(**{name: value}), ()
    for bias in (NAN, INF, -INF, 101.0, LARGE):
        yield "sampling.logit_bias[7]", ask(logit_bias={7: bias}), ("-100", "100")
    yield "sampling.logit_bias[512]", ask(logit_bias=dict.fromkeys(range(10_000), 1.0)), (str(VOCAB_SIZE),)
    yield "sampling.allowed_token_ids", ask(allowed_token_ids=pb.TokenIds()), ()
    yield "sampling.stop", ask(stop=["stop"] * 10_000), ("64", "10000")
    yield "sampling.stop[1]", ask(stop=["a", ""]), ()
    yield "sampling.bad_words", ask(bad_words=["bad"] * 10_000), ("1024", "10000")
    yield "sampling.bad_words[0]", ask(bad_words=["a long word " * 10_000]), ("128",)
    yield "sampling.bad_words[1]", ask(bad_words=["a", ""]), ()
    too_many = pb.SpeculationOptions(num_speculative_tokens=UINT32_MAX)
    yield "speculation.num_speculative_tokens", pb.GenerateRequest(text="a", speculation=too_many), ("4",)


def accepted() -> Iterator[pb.GenerateRequest]:
    for values in (ACCEPTED_FLOATS, ACCEPTED_INTEGERS):
        for name, good_values in values.items():
            for value in good_values:
                yield ask(**{name: value})
    for bias in (-0.0, DENORMAL, 100.0, -100.0):
        yield ask(logit_bias={7: bias})
    yield ask(max_tokens=UINT32_MAX, min_tokens=UINT32_MAX)
    yield ask(logit_bias=dict.fromkeys(range(VOCAB_SIZE), 1.0), allowed_token_ids=ids(*[70] * 100_000))
    yield ask(stop=[f"{i}{'x' * 10_000}" for i in range(64)], stop_token_ids=list(range(300)), min_tokens=8)
    yield ask(bad_words=[f"{i} {'word ' * 24}" for i in range(1024)])
    for priority in (INT32_MIN, INT32_MAX):
        yield pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=2), priority=priority)
    for request_id in ("../%s{}", "名前 😀", " ", "x" * 256):
        yield pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=2), request_id=request_id)
    for role in ("", "\n", "<|im_end|>", "système"):
        yield pb.GenerateRequest(chat=chat((role, "")), sampling=pb.SamplingParams(max_tokens=2))
    off = pb.SpeculationOptions(num_speculative_tokens=0)
    yield pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=2), speculation=off)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealServer]:
    model = build_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE, max_position=MAX_LEN)
    refusing = "{% if messages[0]['role'] == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    (model / "chat_template.jinja").write_text(refusing + CHAT_TEMPLATE)
    async with real_server(model, num_blocks=4 * MAX_LEN // BLOCK_SIZE, speculative_config=NGRAM) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stub(server: RealServer) -> AsyncIterator[InferenceStub]:
    unlimited = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(server.front.target, options=unlimited) as channel:
        yield InferenceStub(channel)


async def outcome(stub: InferenceStub, request: pb.GenerateRequest) -> OutriderClientError | list[pb.GenerateResponse]:
    """The error, typed, or everything that was streamed."""
    try:
        return [response async for response in stub.Generate(request)]
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)


async def greedy(client: AsyncClient, max_tokens: int) -> tuple[int, ...]:
    output = await client.generate("The brown dog", max_tokens=max_tokens, ignore_eos=True, temperature=0)
    return output.choices[0].token_ids


@asynccontextmanager
async def unharmed(server: RealServer, num_tokens: int = 100) -> AsyncIterator[None]:
    """While the block runs, another request runs over and over, and always has its own tokens."""
    expected = await greedy(server.client, num_tokens)
    is_over = asyncio.Event()
    outputs: list[tuple[int, ...]] = []

    async def neighbour() -> None:
        while not is_over.is_set():
            outputs.append(await greedy(server.client, num_tokens))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(neighbour())
        yield
        is_over.set()
    assert set(outputs) == {expected}
    await server.settle()


@asynccontextmanager
async def unblocked(server: RealServer, longest_s: float) -> AsyncIterator[None]:
    """While the block runs, the event loop computes for no longer than `longest_s` until the server answers.

    By the CPU time of its thread: what others take of the machine does not count.
    """
    is_over = asyncio.Event()
    delays: list[float] = []

    async def probe() -> None:
        while not is_over.is_set():
            asked_s = time.thread_time()
            await server.stats()
            delays.append(time.thread_time() - asked_s)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(probe())
        yield
        is_over.set()
    assert max(delays) < longest_s


async def test_every_refusal_names_its_field(server: RealServer, stub: InferenceStub) -> None:
    num_steps = (await server.stats()).num_steps
    for field, request, named in refused():
        what = f"{field} of {str(request)[:200]}"
        error = await outcome(stub, request)
        assert isinstance(error, InvalidRequestError), f"{what}: {error}"
        descriptions = [violation.description for violation in error.violations if violation.field == field]
        assert descriptions, f"{what}: {error.violations}"
        assert all(word in descriptions[0] for word in named), f"{what}: {descriptions}"
    assert (await server.stats()).num_steps == num_steps, "nothing of it was started"


async def test_refusals_harm_nobody(server: RealServer, stub: InferenceStub) -> None:
    async with unharmed(server):
        for field, request, _ in refused():
            assert isinstance(await outcome(stub, request), InvalidRequestError), field


async def test_extremes_are_served_and_harm_nobody(server: RealServer, stub: InferenceStub) -> None:
    async with unharmed(server):
        for request in accepted():
            responses = await outcome(stub, request)
            assert isinstance(responses, list), f"{str(request)[:200]}: {responses}"
            finished = [response.finished for response in responses if response.HasField("finished")]
            assert len(finished) == (request.sampling.n if request.sampling.HasField("n") else 1)


async def test_seeds_at_the_limits_repeat_and_differ(server: RealServer) -> None:
    async def tokens(seed: int) -> tuple[int, ...]:
        output = await server.client.generate("once", seed=seed, max_tokens=20, ignore_eos=True)
        return output.choices[0].token_ids

    seeds = (INT64_MIN, -1, 0, 1, INT64_MAX)
    first, second = [await tokens(seed) for seed in seeds], [await tokens(seed) for seed in seeds]
    assert first == second
    assert len(set(first)) == len(seeds)


async def test_one_below_the_limit_yields_one_token(server: RealServer) -> None:
    output = await server.client.generate(token_ids=[70] * (MAX_LEN - 1), ignore_eos=True)
    assert len(output.choices[0].token_ids) == 1
    assert output.choices[0].finished.finish_reason == "length"


async def test_detokenize_checks_ids(server: RealServer) -> None:
    for token_id in (VOCAB_SIZE, UINT32_MAX):
        with pytest.raises(InvalidRequestError, match=str(VOCAB_SIZE)):
            await server.client.detokenize([1, token_id])


async def test_five_mebibytes_of_ids_do_not_hold_up_the_loop(server: RealServer, stub: InferenceStub) -> None:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[i % VOCAB_SIZE for i in range(3_000_000)]))
    assert request.ByteSize() > 5 << 20
    async with unharmed(server), unblocked(server, longest_s=0.3):
        error = await outcome(stub, request)
    assert isinstance(error, InvalidRequestError)
    assert "3000000 tokens" in str(error)


async def test_a_hundred_mebibytes_are_refused_naming_the_limit(server: RealServer, stub: InferenceStub) -> None:
    async with unharmed(server):
        error = await outcome(stub, pb.GenerateRequest(text="x" * (100 << 20)))
    assert isinstance(error, MessageTooLargeError)
    assert str(16 << 20) in str(error)


async def test_what_is_no_message_ends_its_call_alone(server: RealServer) -> None:
    async with unharmed(server), grpc.aio.insecure_channel(server.front.target) as channel:
        raw: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/outrider.v1.Inference/Generate")
        for body in (b"\x0a\x02\xff\xfe", b"\x0a\x03\xed\xa0\x80", b"\xff\xff\xff", b"\x0a\x7f"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await raw(body).read()
            error = error_from_rpc(caught.value)
            assert isinstance(error, InvalidRequestError)
            assert [violation.field for violation in error.violations] == ["request"]


async def test_too_many_ids_to_abort_are_refused(server: RealServer) -> None:
    async with unblocked(server, longest_s=0.3):
        with pytest.raises(InvalidRequestError, match="10000"):
            await server.client.abort(*map(str, range(100_000)))


async def test_an_unknown_method_is_not_there(server: RealServer) -> None:
    async with grpc.aio.insecure_channel(server.front.target) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/outrider.v1.Inference/Train")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
    assert isinstance(error_from_rpc(caught.value), UnexpectedStatusError)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
