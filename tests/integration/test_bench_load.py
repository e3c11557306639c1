"""The load generator against a real gRPC server that follows a script."""

import asyncio
import math
from itertools import islice

import grpc
import pytest

from clients.aio import AsyncClient
from clients.bench import BenchResult, Load, run_load
from clients.retry import RetryPolicy
from clients.workload import random_prompts
from tests.fakes.scripted_server import ScriptedServer, running_script


async def bench(script: ScriptedServer, load: Load) -> BenchResult:
    prompts = islice(
        random_prompts(input_len=4, output_len=3, prefix_len=0, vocab_size=100, seed=0),
        load.num_prompts + load.num_warmups,
    )
    async with AsyncClient(script.address, retry=RetryPolicy(max_attempts=1)) as client:
        return await run_load(client, prompts, load)


async def test_every_request_is_counted_once_and_warmups_never() -> None:
    async with running_script(ScriptedServer()) as script:
        result = await bench(script, Load(num_prompts=20, num_warmups=3, temperature=0.5, ignore_eos=True))
    assert len(script.requests) == 23
    assert len({tuple(request.token_ids.ids) for request in script.requests}) == 23, "warm-ups warm no prefix"
    assert {request.sampling.temperature for request in script.requests} == {0.5}
    assert {request.sampling.max_tokens for request in script.requests} == {3}
    assert all(request.sampling.ignore_eos for request in script.requests)
    report = result.report()
    assert report["requests"] == {"completed": 20, "failed": 0, "failed_by_status": {}}
    assert report["tokens"] == {"prompt": 200, "cached": 80, "output": 60}
    assert result.measurements.ttft.count == result.measurements.latency.count == 20
    assert result.measurements.message_gap.count == 40
    assert result.client_cpu_s > 0


async def test_closed_loop_keeps_its_number_of_calls() -> None:
    four_are_live = asyncio.Barrier(4)
    async with running_script(ScriptedServer(hold=four_are_live.wait)) as script, asyncio.timeout(60):
        result = await bench(script, Load(num_prompts=32, max_concurrency=4))
    assert result.measurements.num_completed == 32
    assert script.most_live == 4


async def test_open_loop_does_not_wait_for_answers() -> None:
    all_are_live = asyncio.Barrier(10)
    async with running_script(ScriptedServer(hold=all_are_live.wait)) as script, asyncio.timeout(60):
        result = await bench(script, Load(num_prompts=10, request_rate=2000.0))
    assert result.measurements.num_completed == 10


async def test_waiting_for_a_turn_counts_as_latency_in_open_loop() -> None:
    """One slow server, one seat: the tenth request waits for nine others, and its latency says so."""
    async with running_script(ScriptedServer(bursts=(1, 1), pause_s=0.02)) as script:
        result = await bench(script, Load(num_prompts=10, request_rate=1e6, max_concurrency=1))
    assert script.most_live == 1
    assert result.measurements.ttft.maximum >= 9 * 0.02
    assert result.measurements.send_delay.maximum >= 9 * 0.02


async def test_failures_are_counted_by_status_and_end_nothing() -> None:
    refusals = {1: grpc.StatusCode.RESOURCE_EXHAUSTED, 4: grpc.StatusCode.INTERNAL, 6: grpc.StatusCode.INTERNAL}
    async with running_script(ScriptedServer(refusals=refusals)) as script:
        result = await bench(script, Load(num_prompts=10, max_concurrency=1))
    assert result.measurements.failures == {"RESOURCE_EXHAUSTED": 1, "INTERNAL": 2}
    assert result.measurements.num_completed == 7
    assert len(script.requests) == 10, "nothing is sent twice"


async def test_a_deadline_is_a_failure_of_its_own() -> None:
    async with running_script(ScriptedServer(hold=asyncio.Event().wait)) as script:
        result = await bench(script, Load(num_prompts=2, timeout_s=0.1))
    assert result.measurements.failures == {"DEADLINE_EXCEEDED": 2}


async def test_bursts_are_spread_over_their_gaps() -> None:
    async with running_script(ScriptedServer(bursts=(1, 4, 4), pause_s=0.02)) as script:
        result = await bench(script, Load(num_prompts=3))
    measurements = result.measurements
    assert measurements.message_gap.count == 6
    assert measurements.token_gap.count == 24
    assert measurements.token_gap.mean == pytest.approx(measurements.message_gap.mean / 4)
    assert result.report()["bursts"] == {
        "messages": 6,
        "tokens": 24,
        "spread": "a message of n tokens counts as n token gaps of 1/n of the gap before it",
    }


def test_only_an_infinite_rate_with_a_limit_is_closed_loop() -> None:
    assert Load(num_prompts=1, max_concurrency=2).is_closed_loop
    assert not Load(num_prompts=1, max_concurrency=2, request_rate=5.0).is_closed_loop
    assert not Load(num_prompts=1, request_rate=math.inf).is_closed_loop
