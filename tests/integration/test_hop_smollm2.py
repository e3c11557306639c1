"""The default model on server processes that hand on to each other: 50 prompts, each connector, greedy and seeded."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from clients.aio import AsyncClient
from clients.disaggregated import DisaggregatedClient
from server.errors import ModelError
from server.model.resolve import pull
from tests.fakes.hop import SAMPLINGS, Counts, full_tokens, hop_between, ids, settle
from tests.fakes.hop_connectors import CONNECTORS, kv_transfer
from tests.fakes.prompts import load_prompts
from tests.fakes.server_process import ServerProcess, server_processes

LIMIT, NUM_TOKENS, BLOCK_SIZE = 320, 16, 16
AT_A_TIME = 16
BLOCK_NBYTES = 30 * 3 * 2 * 64 * 4 * BLOCK_SIZE  # layers, KV heads, K and V, head size, bytes, tokens
SMALL_POOL = 3 * LIMIT // BLOCK_SIZE

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]
Tokens = list[list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return pull("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"no default model here: {error}")


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    return load_prompts(AutoTokenizer.from_pretrained(model), LIMIT - NUM_TOKENS)


def settings(model: Path, **more: object) -> dict[str, object]:
    return {
        "model": model,
        "max_model_len": LIMIT,
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": 512 * BLOCK_NBYTES,
        "max_num_seqs": AT_A_TIME,
        **more,
    }


async def answers(client: AsyncClient | DisaggregatedClient, prompts: Sequence[list[int]], kind: str) -> Tokens:
    """Of all prompts, some at a time."""
    limit = asyncio.Semaphore(AT_A_TIME)

    async def ask(prompt: list[int]) -> list[tuple[int, ...]]:
        sampling: dict[str, Any] = {"max_tokens": NUM_TOKENS, "cache_salt": kind, **SAMPLINGS[kind]}
        async with limit:
            return ids(await client.generate(token_ids=prompt, **sampling))

    return await asyncio.gather(*map(ask, prompts))


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokens]:
    """What one node says."""

    async def ask(target: str) -> dict[str, Tokens]:
        async with AsyncClient(target) as client:
            return {kind: await answers(client, prompts, kind) for kind in SAMPLINGS}

    with server_processes(tmp_path_factory.mktemp("alone"), {"alone": settings(model)}) as servers:
        return asyncio.run(ask(servers["alone"].target))


@pytest.fixture(scope="module", params=CONNECTORS)
def servers(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServerProcess]]:
    folder = tmp_path_factory.mktemp(request.param)
    config = kv_transfer(request, folder)
    nodes = {role: settings(model, role=role, kv_transfer_config=config) for role in ("prefill", "decode")}
    with server_processes(folder, nodes) as started:
        yield started


def num_shared(prompts: Sequence[list[int]]) -> int:
    """Tokens of full blocks, each of which some prompts begin with."""
    beginnings = {tuple(prompt[:end]) for prompt in prompts for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)}
    return len(beginnings) * BLOCK_SIZE


@pytest.mark.parametrize("kind", SAMPLINGS)
async def test_fifty_prompts(
    servers: dict[str, ServerProcess], prompts: list[list[int]], expected: dict[str, Tokens], kind: str
) -> None:
    async with hop_between([servers["prefill"].target], [servers["decode"].target]) as hop:
        before = await hop.counts()
        assert await answers(hop.client, prompts, kind) == expected[kind]
        counts = await hop.counts() - before
        full = sum(full_tokens(len(prompt), BLOCK_SIZE) for prompt in prompts)
        assert counts == Counts(
            computed=sum(map(len, prompts)) - full, hits=full, loaded=num_shared(prompts), failed_loads=0
        )
        await hop.settle()


async def test_fifty_prompts_with_what_the_cache_has_no_room_for_in_host_memory(
    model: Path, prompts: list[list[int]], expected: dict[str, Tokens], tmp_path: Path
) -> None:
    small = settings(
        model, kv_transfer_config={"kv_connector": "memory"}, kv_cache_memory_bytes=(SMALL_POOL + 1) * BLOCK_NBYTES
    )
    with server_processes(tmp_path, {"node": small}) as servers:
        async with AsyncClient(servers["node"].target) as client:
            assert await answers(client, prompts, "greedy") == expected["greedy"]
            await settle(client)
            before = Counts.of(await client.stats())
            assert await answers(client, prompts, "greedy") == expected["greedy"]
            counts = Counts.of(await client.stats()) - before
            await settle(client)
    assert counts.loaded > num_shared(prompts) // 2
    assert counts.failed_loads == 0
