"""Callers that leave at random moments of the hop, by way of each side and both: nothing stays behind on any node."""

import asyncio
import enum
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clients.aio import AsyncClient
from clients.errors import CancelledCallError, DeadlineExceededError
from tests.fakes.hop import Hop, hop_between, ids
from tests.fakes.hop_connectors import CONNECTORS, kv_transfer
from tests.fakes.server_process import ServerProcess, server_processes
from tests.tiny_model import build_tiny_model

NUM_REQUESTS = 200
AT_A_TIME = 16
NUM_FAMILIES = 40
LAST: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0}

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


class Way(enum.Enum):
    """How a caller leaves. THERE, HERE, BOTH: by an abort on the prefill node, the decode node, or both at once."""

    CANCEL = enum.auto()
    CANCEL_TASK = enum.auto()
    DEADLINE = enum.auto()
    THERE = enum.auto()
    HERE = enum.auto()
    BOTH = enum.auto()
    NOT = enum.auto()


@dataclass(frozen=True)
class Servers:
    """Small pools, so that blocks are short while others leave."""

    alone: ServerProcess
    prefill: ServerProcess
    decode: ServerProcess


@pytest.fixture(params=CONNECTORS)
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    model = build_tiny_model(tmp_path / "model")
    shared: dict[str, object] = {"model": model, "kv_cache_memory_bytes": "1MiB", "max_num_batched_tokens": 64}
    nodes = {**shared, "kv_transfer_config": kv_transfer(request, tmp_path), "max_num_seqs": 8}
    settings = {"alone": shared, "prefill": {**nodes, "role": "prefill"}, "decode": {**nodes, "role": "decode"}}
    with server_processes(tmp_path, settings) as started:
        yield Servers(**started)


def prompt_of(rng: random.Random) -> list[int]:
    """One of some beginnings, and an end of its own."""
    family = random.Random(rng.randrange(NUM_FAMILIES))
    beginning = [family.randrange(3, 500) for _ in range(family.randrange(20, 120))]
    return beginning + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 80))]


async def leave(hop: Hop, way: Way, number: int, rng: random.Random) -> str:
    """One request. Returns: how it ended."""
    request_id, after_s = f"left-{number}", rng.choice((0.0, 0.002, 0.01, 0.03, 0.1, 0.3))
    generation = hop.client.generate(
        token_ids=prompt_of(rng),
        max_tokens=rng.randrange(2, 60),
        n=rng.choice((1, 1, 1, 3)),
        temperature=1.0,
        seed=number,
        ignore_eos=True,
        request_id=request_id,
        timeout_s=after_s if way is Way.DEADLINE else None,
    )
    reading = asyncio.create_task(generation.result())
    await asyncio.sleep(after_s)
    nodes = {Way.THERE: hop.prefill, Way.HERE: hop.decode, Way.BOTH: [*hop.prefill, *hop.decode]}.get(way, [])
    await asyncio.gather(*(node.abort(request_id) for node in nodes))
    if way is Way.CANCEL:
        generation.cancel()
    elif way is Way.CANCEL_TASK:
        reading.cancel()
    try:
        output = await reading
    except (CancelledCallError, DeadlineExceededError, asyncio.CancelledError) as error:
        return type(error).__name__
    return "+".join(sorted({choice.finished.finish_reason for choice in output.choices}))


async def test_two_hundred_callers_leave_at_random(servers: Servers) -> None:
    rng = random.Random(7)
    ways = [list(Way)[number % len(Way)] for number in range(NUM_REQUESTS)]
    rng.shuffle(ways)
    limit = asyncio.Semaphore(AT_A_TIME)

    async with hop_between([servers.prefill.target], [servers.decode.target]) as hop:

        async def one(number: int, way: Way) -> tuple[Way, str]:
            async with limit:
                return way, await leave(hop, way, number, random.Random(number))

        ends = Counter(await asyncio.gather(*(one(number, way) for number, way in enumerate(ways))))
        await hop.settle()
        counts = await hop.counts()
        assert counts.loaded > 0, "KV was on its way meanwhile"
        assert ends[Way.NOT, "length"] == ways.count(Way.NOT), "who stayed was served"
        reasons = Counter[str]()
        for (_, reason), number in ends.items():
            reasons[reason] += number
        assert {"CancelledCallError", "CancelledError", "DeadlineExceededError", "abort", "length"} <= set(reasons)
        async with AsyncClient(servers.alone.target) as alone:
            for number in range(5):
                prompt = prompt_of(random.Random(number))
                expected = await alone.generate(token_ids=prompt, **LAST)
                assert ids(await hop.client.generate(token_ids=prompt, **LAST)) == ids(expected)
        await hop.settle()
