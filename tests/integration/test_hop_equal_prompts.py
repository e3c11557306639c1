"""Many equal prompts at once on an empty store: each node computes or loads what they share once."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clients.aio import AsyncClient
from tests.fakes.hop import full_tokens, hop_between, ids
from tests.fakes.hop_connectors import CONNECTORS, kv_transfer
from tests.fakes.server_process import ServerProcess, server_processes
from tests.tiny_model import build_tiny_model

NUM_EQUAL = 50
LENGTH = 150
NUM_FULL = full_tokens(LENGTH)
PROMPT = [random.Random(1).randrange(3, 500) for _ in range(LENGTH)]
OPTIONS: dict[str, Any] = {"token_ids": PROMPT, "max_tokens": 8, "ignore_eos": True, "temperature": 1.0}

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Servers:
    """A prefill node and two decode nodes; the latter save what they compute, if there is a store."""

    prefill: ServerProcess
    decode: ServerProcess
    second: ServerProcess


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("equal"))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[int, ...]]]:
    """What one node says, by seed."""

    async def ask(target: str) -> list[list[tuple[int, ...]]]:
        async with AsyncClient(target) as client:
            return [ids(await client.generate(**OPTIONS, seed=seed)) for seed in range(NUM_EQUAL)]

    with server_processes(tmp_path_factory.mktemp("alone"), {"alone": {"model": model}}) as servers:
        return asyncio.run(ask(servers["alone"].target))


@pytest.fixture(scope="module", params=CONNECTORS)
def servers(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp(request.param)
    config = kv_transfer(request, folder)
    decode = {"model": model, "role": "decode", "kv_transfer_config": {**config, "kv_role": "kv_both"}}
    prefill = {"model": model, "role": "prefill", "kv_transfer_config": config, "max_num_seqs": 16}
    settings = {"prefill": prefill, "decode": decode, "second": decode}
    with server_processes(folder, settings) as started:
        yield Servers(**started)


async def test_handed_on_to_two_decode_nodes(servers: Servers, expected: list[list[tuple[int, ...]]]) -> None:
    targets = [servers.decode.target, servers.second.target]
    async with hop_between([servers.prefill.target], targets) as hop:
        before = [await hop.counts(node) for node in (*hop.prefill, *hop.decode)]
        options = {**OPTIONS, "cache_salt": "handed on"}
        asked = [hop.client.generate(**options, seed=seed).result() for seed in range(NUM_EQUAL)]
        outputs = await asyncio.gather(*asked)
        assert list(map(ids, outputs)) == expected
        await hop.settle()
        after = [await hop.counts(node) for node in (*hop.prefill, *hop.decode)]
        there, *found = [new - old for old, new in zip(before, after, strict=True)]
        assert there.computed == NUM_FULL + NUM_EQUAL * (LENGTH - NUM_FULL), "the shared blocks once"
        assert [each.loaded for each in found] == [NUM_FULL, NUM_FULL]
        assert [each.failed_loads for each in found] == [0, 0]
        assert sum(each.computed for each in found) == NUM_EQUAL * (LENGTH - NUM_FULL), "and no full block"


async def test_computed_by_two_nodes(servers: Servers, expected: list[list[tuple[int, ...]]]) -> None:
    """Half of them each; what one has saved the other one may load, whole blocks of it."""
    async with hop_between([servers.prefill.target], [servers.decode.target, servers.second.target]) as hop:
        before = [await hop.counts(node) for node in hop.decode]
        nodes = [hop.decode[seed % 2] for seed in range(NUM_EQUAL)]
        options = {**OPTIONS, "cache_salt": "computed"}
        asked = [node.generate(**options, seed=seed).result() for seed, node in enumerate(nodes)]
        outputs = await asyncio.gather(*asked)
        assert list(map(ids, outputs)) == expected
        await hop.settle()
        for node, old in zip(hop.decode, before, strict=True):
            counts = await hop.counts(node) - old
            assert counts.computed + counts.loaded == NUM_FULL + NUM_EQUAL // 2 * (LENGTH - NUM_FULL)
            assert counts.failed_loads == 0
