"""Stores that fail between server processes: a full disk, blocks that do not come, a server that is killed."""

import asyncio
import itertools
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from clients.aio import AsyncClient
from tests.fakes.hop import Hop, full_tokens, hop_between, ids
from tests.fakes.lmcache_process import LMCacheProcess
from tests.fakes.server_process import ServerProcess, server_processes
from tests.tiny_model import build_tiny_model

GREEDY: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}
DISK_NBYTES = 256 << 10
AGAIN_S = 60.0
IN_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("store-faults"))


def files(folder: Path) -> dict[str, Any]:
    return {"kv_connector": "filesystem", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}


def family(count: int, seed: int) -> list[list[int]]:
    """Prompts that begin with the same five blocks, and go on differently."""
    rng = random.Random(seed)
    beginning = [rng.randrange(3, 500) for _ in range(80)]
    return [beginning + [rng.randrange(3, 500) for _ in range(90)] for _ in range(count)]


async def are_right(hop: Hop, alone: str, prompts: Sequence[list[int]]) -> None:
    """All at once, what two nodes say is what one says."""
    async with AsyncClient(alone) as client:
        outputs = await asyncio.gather(*(hop.client.generate(token_ids=prompt, **GREEDY) for prompt in prompts))
        expected = await asyncio.gather(*(client.generate(token_ids=prompt, **GREEDY) for prompt in prompts))
    assert list(map(ids, outputs)) == list(map(ids, expected))


@pytest.fixture
def small_disk(tmp_path: Path) -> tuple[Path, list[str]]:
    """A folder, and the command that a process sees a small disk there by."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = f'mount -t tmpfs -o size={DISK_NBYTES} tmpfs "{folder}" && exec "$@"'
    wrapper = [*IN_NAMESPACE, "sh", "-c", mount, "sh"]
    if shutil.which(IN_NAMESPACE[0]) is None or subprocess.run([*wrapper, "true"], capture_output=True).returncode:
        pytest.skip("no mounts of its own for a process here")
    return folder, wrapper


async def test_a_full_disk(model: Path, alone: str, small_disk: tuple[Path, list[str]], tmp_path: Path) -> None:
    """One node that has too small a cache for what it is asked, and a disk that is full after a few of them."""
    folder, wrapper = small_disk
    node = {"model": model, "kv_transfer_config": files(folder), "kv_cache_memory_bytes": "512KiB", "wrapper": wrapper}
    prompts = [prompt for seed in range(6) for prompt in family(3, seed)]
    with server_processes(tmp_path, {"node": node}) as servers:
        async with hop_between([], [servers["node"].target]) as hop:
            for _ in range(3):
                await are_right(hop, alone, prompts)
                await hop.settle()
            assert (await hop.counts()).loaded > 0, "what it had room for is of use"
        assert servers["node"].log.count("No space left on device") == 1


async def test_a_full_disk_of_a_prefill_node(
    model: Path, alone: str, small_disk: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """It hands on all the same, and the decode node computes what it does not find."""
    folder, wrapper = small_disk
    shared = {"model": model, "kv_transfer_config": files(folder)}
    settings = {"prefill": {**shared, "role": "prefill", "wrapper": wrapper}, "decode": {**shared, "role": "decode"}}
    prompts = [prompt for seed in range(6) for prompt in family(3, seed)]
    with server_processes(tmp_path, settings) as servers:
        async with hop_between([servers["prefill"].target], [servers["decode"].target]) as hop:
            await are_right(hop, alone, prompts)
            await hop.settle()
            assert (await hop.counts(hop.prefill[0])).computed > 0
            counts = await hop.counts()
            assert (counts.loaded, counts.failed_loads) == (0, 0)


async def test_a_fifth_of_all_loads_fail(model: Path, alone: str, tmp_path: Path) -> None:
    store = files(tmp_path / "blocks")
    faulty = {"store": store, "load_failure_rate": 0.2, "max_delay_seconds": 0.005}
    fault = {"kv_connector": "fault", "kv_connector_extra_config": faulty}
    settings = {
        "prefill": {"model": model, "role": "prefill", "kv_transfer_config": store},
        "decode": {"model": model, "role": "decode", "kv_transfer_config": fault},
    }
    prompts = [prompt for seed in range(8) for prompt in family(5, seed)]
    with server_processes(tmp_path, settings) as servers:
        async with hop_between([servers["prefill"].target], [servers["decode"].target]) as hop:
            await are_right(hop, alone, prompts)
            await hop.settle()
            counts = await hop.counts()
            assert counts.failed_loads > 0
            assert 0 < counts.loaded < sum(full_tokens(len(prompt)) for prompt in prompts)


@pytest.fixture
def lmcache_nodes(model: Path, lmcache_server: LMCacheProcess, tmp_path: Path) -> Iterator[dict[str, ServerProcess]]:
    config = {"kv_connector": "lmcache", "kv_connector_extra_config": {"port": lmcache_server.port}}
    nodes = {role: {"model": model, "role": role, "kv_transfer_config": config} for role in ("prefill", "decode")}
    with server_processes(tmp_path, nodes) as servers:
        yield servers


@pytest.mark.skipif(find_spec("lmcache") is None, reason="lmcache is not installed")
async def test_lmcaches_server_is_killed_and_started_again_at_once(
    lmcache_nodes: dict[str, ServerProcess], lmcache_server: LMCacheProcess, alone: str
) -> None:
    def restart() -> None:
        lmcache_server.kill()
        lmcache_server.start()

    async with hop_between([lmcache_nodes["prefill"].target], [lmcache_nodes["decode"].target]) as hop:
        await are_right(hop, alone, family(4, 0))
        before = await hop.counts()
        assert before.loaded > 0
        asking = asyncio.create_task(
            are_right(hop, alone, [prompt for seed in range(1, 9) for prompt in family(3, seed)])
        )
        await asyncio.to_thread(restart)
        await asking
        await hop.settle()
        before = await hop.counts()
        async with asyncio.timeout(AGAIN_S):  # both nodes leave it alone for a while
            for seed in itertools.count(20):
                await are_right(hop, alone, family(1, seed))
                if (await hop.counts()).loaded > before.loaded:
                    break
        await hop.settle()
