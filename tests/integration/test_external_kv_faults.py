"""Stores that fail, change or hang, and callers that leave: tokens stay right, and nothing is left behind."""

import asyncio
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import connectors.content.patience
from connectors.content.scheduler import ContentScheduler
from connectors.filesystem import FilesystemStore
from server.errors import DeadlineExceeded, OutriderError, RequestFailed
from server.plan import StepPlan
from server.preprocess import TokensPrompt
from server.request import SamplingParams
from server.worker.results import StepHandle
from server.worker.runner import Runner
from tests.fakes.engine_under_test import EngineUnderTest, engine_on
from tests.fakes.gated_connector import STORES
from tests.fakes.gated_store import GatedStore
from tests.fakes.kv_engines import BLOCK_NBYTES, BLOCK_SIZE, faulty, files, fill, kv_engine, num_full, tokens
from tests.tiny_model import build_tiny_model

GATED = {"kv_connector": "tests.fakes.gated_connector:GatedConfig"}
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("faults"))


@pytest.fixture(autouse=True)
def _stores() -> Iterator[None]:
    STORES.clear()
    yield
    for store in STORES:
        store.open()


def family(count: int, shared: int = 40, own: int = 50, seed: int = 0) -> list[list[int]]:
    """Prompts that begin alike."""
    rng = random.Random(seed)
    beginning = [rng.randrange(3, 500) for _ in range(shared)]
    return [beginning + [rng.randrange(3, 500) for _ in range(own)] for _ in range(count)]


def alone(model: Path, prompts: Sequence[list[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    with engine_on(model, "cpu") as engine:
        return tokens(engine.generate(prompts, sampling))


def test_a_fifth_of_all_loads_fail(model: Path, tmp_path: Path) -> None:
    prompts = [prompt for seed in range(4) for prompt in family(5, seed=seed)]
    fill(model, files(tmp_path), prompts)
    config = faulty(tmp_path, load_failure_rate=0.2, max_delay_seconds=0.002)
    with kv_engine(model, config) as engine:
        outcomes = engine.generate(prompts, GREEDY)
        statistics = engine.statistics()
    assert tokens(outcomes) == alone(model, prompts)
    assert statistics.num_failed_loads > 0
    assert 0 < statistics.external_loaded_tokens < sum(map(num_full, prompts))


def test_finding_loading_and_saving_fail_with_a_pool_that_is_too_small(model: Path, tmp_path: Path) -> None:
    prompts = [prompt for seed in range(3) for prompt in family(4, seed=seed)]
    fill(model, files(tmp_path), prompts[::2])
    rates = {f"{what}_failure_rate": 0.3 for what in ("load", "find", "save")}
    config = faulty(tmp_path, **rates, max_delay_seconds=0.002, seed=3)
    with kv_engine(model, config, kv_cache_memory_bytes=20 * BLOCK_NBYTES) as engine:
        for _ in range(2):
            assert tokens(engine.generate(prompts, GREEDY, arrivals=random.Random(1))) == alone(model, prompts)


def remove(path: str) -> None:
    os.unlink(path)


def truncate(path: str) -> None:
    os.truncate(path, 1000)


def flip(path: str) -> None:
    data = bytearray(Path(path).read_bytes())
    data[-100] ^= 1
    Path(path).write_bytes(data)


@pytest.mark.parametrize("damage", [remove, truncate, flip])
def test_a_file_is_damaged_between_match_and_load(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[str], None]
) -> None:
    prompts = family(2)
    fill(model, files(tmp_path), prompts)
    load, loaded = FilesystemStore.load, []

    def load_late(store: FilesystemStore, namespace: str, block_hash: bytes, into: memoryview) -> bool:
        loaded.append(block_hash)
        if len(loaded) == 4:  # the first sequence's, behind what both share
            damage(store._path(namespace, block_hash))
        return load(store, namespace, block_hash, into)

    monkeypatch.setattr(FilesystemStore, "load", load_late)
    with kv_engine(model, files(tmp_path)) as engine:
        outcomes = engine.generate(prompts, GREEDY)
        assert engine.statistics().num_failed_loads == 1
        assert engine.statistics().external_loaded_tokens == (3 + 3) * BLOCK_SIZE
    assert tokens(outcomes) == alone(model, prompts)


def test_by_policy_a_failed_load_fails_its_request_alone(model: Path, tmp_path: Path) -> None:
    [broken] = family(1)
    others = family(3, seed=1)
    fill(model, files(tmp_path), [broken, *others])
    config = faulty(tmp_path, load_failure_rate=1.0) | {"kv_load_failure_policy": "fail"}
    with kv_engine(model, config) as engine:
        outcomes = engine.generate([broken], [SamplingParams(max_tokens=10, n=3, temperature=0)])
        assert isinstance(outcomes[0].error, RequestFailed)
        assert "could not be loaded" in str(outcomes[0].error)
        fresh = family(2, seed=9)
        assert tokens(engine.generate(fresh, GREEDY)) == alone(model, fresh), "nothing of theirs is to be loaded"


def test_by_policy_what_is_not_to_be_had_is_computed(model: Path, tmp_path: Path) -> None:
    prompts = family(3)
    config = files(tmp_path, kv_load_failure_policy="fail")
    with kv_engine(model, config) as engine:
        assert tokens(engine.generate(prompts, GREEDY)) == alone(model, prompts)


def test_a_store_that_hangs_holds_up_nobody_for_long(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectors.content.patience, "STORE_TIMEOUT_S", 0.05)
    prompts = family(4)
    with engine_on(model, "cpu", kv_transfer_config=GATED) as engine:
        [store] = STORES
        store.finding.clear()
        store.saving.clear()
        assert tokens(engine.generate(prompts, GREEDY)) == alone(model, prompts)
        assert engine.statistics().num_running == 0
        assert 0 < engine.statistics().num_held_blocks <= 0.25 * engine.statistics().kv_blocks_total
        store.open()
        engine.settle()


def test_a_load_that_hangs_is_given_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [*family(3), *family(3, seed=1)]
    with engine_on(model, "cpu", kv_transfer_config=GATED, kv_cache_memory_bytes=50 * BLOCK_NBYTES) as engine:
        store = _fill_and_forget(engine, prompts)
        monkeypatch.setattr(ContentScheduler, "load_timeout_s", 2.0)
        monkeypatch.setattr(connectors.content.patience, "STORE_TIMEOUT_S", 1.0)
        store.loading.clear()
        outcomes = engine.generate(prompts, GREEDY)
        assert tokens(outcomes) == alone(model, prompts)
        assert engine.statistics().num_failed_loads > 0
        assert engine.statistics().num_held_blocks > 0, "they are still written to"
        store.open()
        engine.settle()


def _fill_and_forget(engine: EngineUnderTest, prompts: Sequence[list[int]]) -> GatedStore:
    """Have the store hold prompts that the cache does not."""
    engine.generate(prompts, SamplingParams(max_tokens=1))
    engine.settle()
    num_others = engine.statistics().kv_blocks_total // 12 + 1
    others = [family(1, 190, seed=77 + i)[0][: 12 * BLOCK_SIZE] for i in range(num_others)]
    engine.generate(others, SamplingParams(max_tokens=1))
    engine.settle()
    return STORES[-1]


def test_a_deadline_ends_a_request_that_waits_for_a_load(model: Path) -> None:
    prompts = family(1)
    with engine_on(model, "cpu", kv_transfer_config=GATED, kv_cache_memory_bytes=14 * BLOCK_NBYTES) as engine:
        store = _fill_and_forget(engine, prompts)
        store.loading.clear()
        [error] = engine._run(_race(engine, prompts, deadline_s=0.5))
        assert isinstance(error, DeadlineExceeded)
        assert engine.statistics().num_waiting == 0
        store.open()
        engine.settle()


async def _race(engine: EngineUnderTest, prompts: Sequence[list[int]], deadline_s: float) -> list[OutriderError | None]:
    """Each request with a deadline from now on. Returns: the errors that they end with."""
    core = engine.core

    async def run(index: int) -> OutriderError | None:
        until_s = core.engine.now() + deadline_s
        request_id = f"race-{index}"
        stream = core.engine.open(request_id, deadline_s=until_s)
        request = core.preprocessor.build(
            TokensPrompt(prompts[index]), GREEDY, request_id=request_id, deadline_s=until_s
        )
        core.engine.submit(stream, request)
        try:
            async for _ in stream:
                pass
        except OutriderError as error:
            return error
        return None

    return list(await asyncio.gather(*map(run, range(len(prompts)))))


def test_stopping_does_not_wait_for_a_store_that_hangs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.compose.CONNECTOR_SHUTDOWN_S", 0.05)
    monkeypatch.setattr(connectors.content.patience, "STORE_TIMEOUT_S", 0.05)
    with engine_on(model, "cpu", kv_transfer_config=GATED) as engine:
        [store] = STORES
        store.finding.clear()
        store.saving.clear()
        assert tokens(engine.generate(family(1), GREEDY)) == alone(model, family(1))
    assert store.num_closed == 0


def cancel_at_random(model: Path, folder: Path, count: int, **settings: Any) -> None:
    rng = random.Random(count)
    prompts = [prompt for seed in range(max(1, count // 5)) for prompt in family(5, seed=seed)]
    fill(model, files(folder), prompts[::2])
    config = faulty(folder, load_failure_rate=0.1, max_delay_seconds=0.003)
    with kv_engine(model, config, kv_cache_memory_bytes=30 * BLOCK_NBYTES, max_num_seqs=6, **settings) as engine:
        core = engine.core
        num_whole = 0

        async def run(index: int) -> None:
            nonlocal num_whole
            request_id = f"cancelled-{index}"
            await asyncio.sleep(rng.uniform(0, 0.01 * count))
            stream = core.engine.open(request_id)
            sampling = SamplingParams(max_tokens=20, temperature=0, n=rng.choice((1, 1, 3)), ignore_eos=True)
            core.engine.submit(
                stream, core.preprocessor.build(TokensPrompt(prompts[index]), sampling, request_id=request_id)
            )
            loop = asyncio.get_running_loop()
            timer = loop.call_later(rng.choice((0.0, 0.003, 0.02, 0.1)), core.engine.abort, request_id)
            async for _ in stream:
                pass
            timer.cancel()
            num_whole += all(end.num_completion_tokens == 20 for end in stream.finished)

        async def run_all() -> None:
            await asyncio.gather(*map(run, range(count)))

        engine._run(run_all())
        assert num_whole < count, "some were cancelled"
        engine.settle()
        external = core.scheduler.external
        assert external is not None
        assert not any((external.loads._wishes, external.loads._loads, external.saves._queued))
        assert not core.scheduler.has_requests


@pytest.mark.parametrize("depth", [0, 1])
def test_callers_leave_at_random(model: Path, tmp_path: Path, depth: int) -> None:
    cancel_at_random(model, tmp_path, 20, pipeline_depth=depth)


@pytest.mark.full
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [0, 1])
def test_many_callers_leave_at_random(model: Path, tmp_path: Path, depth: int, policy: str) -> None:
    cancel_at_random(model, tmp_path, 200, pipeline_depth=depth, scheduling_policy=policy)


def test_a_step_that_fails_begins_the_loads_that_came_with_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [loaded] = family(1)
    [running] = family(1, own=5, seed=1)
    fill(model, files(tmp_path), [loaded])
    launch = Runner._launch
    failed: list[StepPlan] = []

    def fail_once(runner: Runner, plan: StepPlan) -> StepHandle:
        if plan.transfers is not None and plan.transfers.filled_blocks and not failed:
            failed.append(plan)
            raise RuntimeError("out of memory")
        return launch(runner, plan)

    monkeypatch.setattr(Runner, "_launch", fail_once)
    with kv_engine(model, files(tmp_path)) as engine:
        outcomes = engine.generate(
            [running, loaded], [SamplingParams(max_tokens=400, ignore_eos=True), GREEDY], arrivals=random.Random(0)
        )
        assert isinstance(outcomes[0].error, RequestFailed)
        assert outcomes[1].num_cached_tokens == num_full(loaded)
    assert len(failed) == 1
    assert tokens(outcomes[1:]) == alone(model, [loaded])
