"""Server processes that hand on to each other: tokens are those of one, and no full block is computed twice."""

import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from clients.aio import AsyncClient
from tests.fakes.hop import SAMPLINGS, Counts, Hop, full_tokens, hop_between, ids
from tests.fakes.hop_connectors import CONNECTORS, kv_transfer
from tests.fakes.server_process import ServerProcess, server_processes
from tests.tiny_model import build_tiny_model

BLOCK_SIZE, BUDGET = 32, 80
OTHER_BLOCK_SIZE = 48
"""Neither divides the other, nor the prefill node's chunks."""
SMALL_POOL = 5
BLOCK_NBYTES = 16384

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
salts = count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("processes"))


@dataclass(frozen=True)
class Servers:
    """Those of one connector. Attributes: small: a decode node with SMALL_POOL blocks. other: with other blocks."""

    name: str
    alone: str
    prefill: ServerProcess
    decode: ServerProcess
    small: ServerProcess
    other: ServerProcess

    @asynccontextmanager
    async def hop(self, decode: ServerProcess | None = None) -> AsyncIterator["AskedHop"]:
        """The prefill node and a decode node, which have nothing to do in the end."""
        target = (decode or self.decode).target
        async with hop_between([self.prefill.target], [target]) as hop, AsyncClient(self.alone) as alone:
            yield AskedHop(hop, alone)
            await hop.settle()


@pytest.fixture(scope="module", params=CONNECTORS)
def servers(
    request: pytest.FixtureRequest, model: Path, alone: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp(request.param)
    shared: dict[str, object] = {
        "model": model,
        "kv_transfer_config": kv_transfer(request, folder),
        "block_size": BLOCK_SIZE,
    }
    decode = {**shared, "role": "decode"}
    chunked = {"role": "prefill", "max_num_batched_tokens": BUDGET, "max_num_seqs": 16}
    settings = {
        "prefill": {**shared, **chunked},
        "decode": decode,
        "small": {**decode, "kv_cache_memory_bytes": (SMALL_POOL + 1) * BLOCK_NBYTES},
        "other": {**decode, "block_size": OTHER_BLOCK_SIZE},
    }
    with server_processes(folder, settings) as started:
        yield Servers(name=request.param, alone=alone, **started)


class AskedHop:
    """Nodes that are asked what one node is asked too."""

    def __init__(self, hop: Hop, alone: AsyncClient) -> None:
        self.hop = hop
        self._alone = alone

    async def both(self, prompt: Sequence[int], **options: Any) -> Counts:
        """Assert that two nodes say what one says. Returns: what the decode node has counted meanwhile."""
        values = {"token_ids": prompt, "max_tokens": 12, "ignore_eos": True, "cache_salt": str(next(salts)), **options}
        expected = await self._alone.generate(**values)
        before = await self.hop.counts()
        assert ids(await self.hop.client.generate(**values)) == ids(expected)
        return await self.hop.counts() - before


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, 500) for _ in range(length)]


def moved(length: int) -> Counts:
    """What a decode node counts for a prompt of which nothing was there before: its full blocks came."""
    loaded = full_tokens(length, BLOCK_SIZE)
    return Counts(computed=length - loaded, hits=loaded, loaded=loaded, failed_loads=0)


@pytest.mark.parametrize("kind", SAMPLINGS)
async def test_every_length_from_one_to_three_blocks_and_a_token(servers: Servers, kind: str) -> None:
    async with servers.hop() as hop:
        for length in range(1, 3 * BLOCK_SIZE + 2):
            assert await hop.both(prompt_of(length), **SAMPLINGS[kind]) == moved(length), length


@pytest.mark.parametrize("length", [5 * BUDGET, 5 * BUDGET + 7])
async def test_a_prompt_of_five_budgets(servers: Servers, length: int) -> None:
    async with servers.hop() as hop:
        assert await hop.both(prompt_of(length), **SAMPLINGS["greedy"]) == moved(length)


@pytest.mark.parametrize("num_local", [0, 1, 5, 6])
async def test_only_what_the_decode_node_lacks_comes(servers: Servers, num_local: int) -> None:
    prompt, salt = prompt_of(6 * BLOCK_SIZE + 3), f"local {num_local}"
    async with servers.hop() as hop:
        beginning = prompt[: num_local * BLOCK_SIZE + 1]
        await hop.hop.decode[0].generate(token_ids=beginning, max_tokens=1, cache_salt=salt)
        counts = await hop.both(prompt, **SAMPLINGS["greedy"], cache_salt=salt)
    assert counts == Counts(computed=3, hits=6 * BLOCK_SIZE, loaded=(6 - num_local) * BLOCK_SIZE, failed_loads=0)


async def test_prompts_and_their_first_token(servers: Servers) -> None:
    """Of choices that differ in it, in the middle of a block and at its end."""
    async with servers.hop() as hop:
        for length in (3 * BLOCK_SIZE - 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1):
            counts = await hop.both(prompt_of(length), temperature=1.2, seed=3, n=4, max_tokens=3)
            assert counts.loaded == full_tokens(length, BLOCK_SIZE), "once for all of them"
            assert counts.computed == 4 * (length - counts.loaded)


@pytest.mark.parametrize("length", [4 * BLOCK_SIZE, 4 * BLOCK_SIZE + 1, 5 * BLOCK_SIZE - 2])
async def test_a_pool_of_exactly_the_prompts_blocks(servers: Servers, length: int) -> None:
    """From elsewhere, and, where the block of the first token is free, a second time from the pool itself."""
    async with servers.hop(servers.small) as hop:
        assert (await hop.hop.decode[0].stats()).kv_blocks_total == SMALL_POOL
        values = {**SAMPLINGS["greedy"], "max_tokens": SMALL_POOL * BLOCK_SIZE - length, "cache_salt": f"pool {length}"}
        assert await hop.both(prompt_of(length), **values) == moved(length)
        again = await hop.both(prompt_of(length), **values)
        assert (again.loaded, again.hits) == (0, full_tokens(length, BLOCK_SIZE))


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("length", [31, 32, 47, 48, 95, 96, 97, 5 * BUDGET])
async def test_blocks_and_chunks_that_do_not_divide_each_other(servers: Servers, kind: str, length: int) -> None:
    """Peers cut blocks anew; of stores nothing is found."""
    async with servers.hop(servers.other) as hop:
        counts = await hop.both(prompt_of(length), **SAMPLINGS[kind])
    is_cut = servers.name in ("tcp", "nixl")
    loaded = full_tokens(full_tokens(length, BLOCK_SIZE), OTHER_BLOCK_SIZE) if is_cut else 0
    assert counts == Counts(computed=length - loaded, hits=loaded, loaded=loaded, failed_loads=0)
