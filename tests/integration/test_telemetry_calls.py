"""From a gRPC call to the collector: the real front, telemetry and OTLP, around a scripted engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from clients.aio import AsyncClient
from clients.errors import OutriderClientError
from clients.retry import RetryPolicy
from server.config import ObservabilityConfig, ServerConfig
from server.engine.protocol import (
    Delta,
    Engine,
    Finished,
    FinishReason,
    SpeculationStats,
    Started,
    StreamEvent,
    Timing,
)
from server.events import EventBus
from server.preprocess import Preprocessor
from server.request import Request
from server.rpc.lifecycle import GrpcServer
from server.telemetry.pipeline import Telemetry
from server.tokenizer import Tokenizer
from tests.fakes.eventually import eventually
from tests.fakes.front import tiny_model_info
from tests.fakes.otlp_receiver import OtlpReceiver, attributes, running_receiver
from tests.fakes.scripted_engine import ScriptedEngine

Outcome = Callable[[AsyncClient, ScriptedEngine], Awaitable[None]]


async def three_tokens(request: Request) -> AsyncIterator[StreamEvent]:
    """A burst of two after the first token."""
    yield Started(request.request_id, len(request.prompt_token_ids), 0)
    yield Delta(0, "a", (1,))
    await asyncio.sleep(0.002)
    yield Delta(0, "bc", (2, 3))
    yield Finished(
        index=0,
        finish_reason=FinishReason.LENGTH,
        stop_reason=None,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_completion_tokens=3,
        num_cached_tokens=0,
        timing=Timing(1e-6, 2e-6, 3e-6, 3e-6, 6e-6),
        speculation=SpeculationStats(1, 5, 1),
    )


async def endless(request: Request) -> AsyncIterator[StreamEvent]:
    """Begin and never end."""
    yield Started(request.request_id, len(request.prompt_token_ids), 0)
    yield Delta(0, "a", (1,))
    await asyncio.Event().wait()


async def broken(request: Request) -> AsyncIterator[StreamEvent]:
    """Begin and fail."""
    yield Started(request.request_id, len(request.prompt_token_ids), 0)
    raise RuntimeError("a bug")


@asynccontextmanager
async def observed(engine: Engine, tokenizer: Tokenizer, receiver: OtlpReceiver) -> AsyncIterator[AsyncClient]:
    """A client of a front whose telemetry has reached the receiver once the block is left."""
    bus = EventBus()
    config = ObservabilityConfig(otlp_endpoint=receiver.endpoint)
    telemetry = Telemetry.start(config, engine, bus, lambda: True, lambda: True, {})
    server = GrpcServer(
        ServerConfig(port=0, shutdown_timeout_seconds=0), engine, Preprocessor(tokenizer, engine.model_info), bus
    )
    port = await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}", retry=RetryPolicy(max_attempts=1)) as client:
            yield client
    finally:
        await server.stop()
        await asyncio.to_thread(telemetry.shutdown, 30.0)


async def test_a_generation_is_traced_and_measured(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tiny_model_info(), three_tokens)
    with running_receiver() as receiver:
        async with observed(engine, tokenizer, receiver) as client:
            await client.generate(
                token_ids=[5, 6, 7],
                temperature=0.5,
                top_p=0.75,
                top_k=9,
                max_tokens=3,
                request_id="mine",
                metadata=[("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01"), ("tracestate", "vendor=x")],
            )
    [span] = receiver.server_spans()
    assert (span.trace_id, span.parent_span_id, span.trace_state) == (b"\xab" * 16, b"\xcd" * 8, "vendor=x")
    described = attributes(span.attributes)
    expected = {
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.top_k": 9,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.response.id": "mine",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "outrider.speculation.draft_tokens": 5,
        "outrider.speculation.accepted_tokens": 1,
    }
    assert {name: described.get(name) for name in expected} == expected
    assert set(receiver.children(span)) == {"queue", "prefill", "decode"}
    [burst] = receiver.metrics["outrider_inter_token_gap"].histogram.data_points
    assert (burst.count, attributes(burst.attributes)) == (2, {"burst": "true"})
    [first] = receiver.metrics["gen_ai.server.time_to_first_token"].histogram.data_points
    assert first.count == 1


async def test_fifty_concurrent_calls_keep_their_own_parents(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tiny_model_info(), three_tokens)
    with running_receiver() as receiver:
        async with observed(engine, tokenizer, receiver) as client, asyncio.TaskGroup() as tasks:
            for number in range(1, 51):
                metadata = [("traceparent", f"00-{number:032x}-{number + 1000:016x}-01")]
                generation = client.generate(token_ids=[5], request_id=str(number), metadata=metadata)
                tasks.create_task(generation.result())
    spans = receiver.server_spans()
    assert sorted(int(str(attributes(span.attributes)["gen_ai.response.id"])) for span in spans) == [*range(1, 51)]
    for span in spans:
        number = int(str(attributes(span.attributes)["gen_ai.response.id"]))
        assert int.from_bytes(span.trace_id, "big") == number
        assert int.from_bytes(span.parent_span_id, "big") == number + 1000
        assert set(receiver.children(span)) == {"queue", "prefill", "decode"}


async def refused(client: AsyncClient, _engine: ScriptedEngine) -> None:
    await client.generate(token_ids=[5], temperature=-1.0)


async def crowded_out(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.max_live = 0
    await client.generate(token_ids=[5])


async def cancelled(client: AsyncClient, engine: ScriptedEngine) -> None:
    async with client.generate(token_ids=[5]) as generation:
        async for _ in generation:
            break
    await eventually(lambda: not engine.live)


async def expired(client: AsyncClient, _engine: ScriptedEngine) -> None:
    await client.generate(token_ids=[5], timeout_s=1.0)


async def failed(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = broken
    await client.generate(token_ids=[5])


async def aborted(client: AsyncClient, engine: ScriptedEngine) -> None:
    generation = client.generate(token_ids=[5], request_id="mine")
    async for _ in generation:
        engine.abort("mine")


@pytest.mark.parametrize(
    ("outcome", "status", "is_error"),
    [
        (refused, "INVALID_ARGUMENT", False),
        (crowded_out, "RESOURCE_EXHAUSTED", False),
        (cancelled, "CANCELLED", False),
        (expired, "DEADLINE_EXCEEDED", True),
        (failed, "INTERNAL", True),
        (aborted, "OK", False),
    ],
)
async def test_every_outcome_is_one_ended_span(
    outcome: Outcome, status: str, is_error: bool, tokenizer: Tokenizer
) -> None:
    engine = ScriptedEngine(tiny_model_info(), endless)
    with running_receiver() as receiver:
        async with observed(engine, tokenizer, receiver) as client:
            with suppress(OutriderClientError):
                await outcome(client, engine)
    [span] = receiver.server_spans()
    assert attributes(span.attributes)["rpc.response.status_code"] == status
    assert (span.status.code == Status.STATUS_CODE_ERROR) == is_error
    assert span.end_time_unix_nano > span.start_time_unix_nano
    [duration] = receiver.metrics["gen_ai.server.request.duration"].histogram.data_points
    assert duration.count == 1
    assert attributes(duration.attributes)["rpc.response.status_code"] == status
