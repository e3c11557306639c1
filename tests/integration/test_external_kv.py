"""KV that another engine has computed: tokens are those of one engine, and nothing is computed twice."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from server.request import SamplingParams
from tests.fakes.device import DEVICE
from tests.fakes.engine_under_test import engine_on
from tests.fakes.kv_engines import BLOCK_NBYTES, BLOCK_SIZE, files, fill, kv_engine, num_full, tokens
from tests.tiny_model import build_tiny_model

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 64, 100, 150)
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.9, "seed": 4}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("kv"))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """No two of them begin with the same block, whatever their lengths and seeds."""
    rng = random.Random(f"{seed}/{length}")
    return [rng.randrange(3, 500) for _ in range(length)]


def params(kind: str = "greedy", **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **SAMPLINGS[kind], **more})


def alone(model: Path, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
    """What an engine without a connector says."""
    with engine_on(model, DEVICE) as engine:
        return tokens(engine.generate(prompts, sampling))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_tokens_are_the_same_and_no_full_block_of_a_prompt_is_computed(
    model: Path, tmp_path: Path, kind: str, depth: int
) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    fill(model, files(tmp_path), prompts, pipeline_depth=depth)
    with kv_engine(model, files(tmp_path), pipeline_depth=depth) as engine:
        outcomes = engine.generate(prompts, params(kind))
        statistics = engine.statistics()
    assert tokens(outcomes) == alone(model, prompts, params(kind))
    assert [outcome.num_cached_tokens for outcome in outcomes] == [num_full(prompt) for prompt in prompts]
    assert statistics.external_loaded_tokens == statistics.external_queried_tokens == sum(map(num_full, prompts))
    assert statistics.num_failed_loads == 0


def test_every_length_from_one_to_three_blocks_and_a_token(model: Path, tmp_path: Path) -> None:
    prompts = [prompt_of(length) for length in range(1, 3 * BLOCK_SIZE + 2)]
    fill(model, files(tmp_path), prompts)
    with kv_engine(model, files(tmp_path)) as engine:
        outcomes = [engine.generate([prompt], params(max_tokens=3))[0] for prompt in prompts]
    assert tokens(outcomes) == alone(model, prompts, params(max_tokens=3))
    assert [outcome.num_cached_tokens for outcome in outcomes] == [num_full(prompt) for prompt in prompts]


def test_a_prompt_of_five_budgets(model: Path, tmp_path: Path) -> None:
    prompts = [prompt_of(5 * 64)]
    fill(model, files(tmp_path), prompts, max_num_batched_tokens=64)
    with kv_engine(model, files(tmp_path), max_num_batched_tokens=64) as engine:
        outcomes = engine.generate(prompts, params())
    assert tokens(outcomes) == alone(model, prompts, params())
    assert outcomes[0].num_cached_tokens == num_full(prompts[0])


@pytest.mark.parametrize("num_local", [0, 1, 5, 6])
def test_only_what_is_not_here_is_loaded(model: Path, tmp_path: Path, num_local: int) -> None:
    prompt = prompt_of(6 * BLOCK_SIZE + 3)
    fill(model, files(tmp_path / "all"), [prompt])
    with kv_engine(model, files(tmp_path / "all")) as engine:
        engine.generate([prompt[: num_local * BLOCK_SIZE + 1]], params(max_tokens=1))
        before = engine.statistics().external_loaded_tokens
        outcomes = engine.generate([prompt], params())
        assert engine.statistics().external_loaded_tokens - before == (6 - num_local) * BLOCK_SIZE
    assert tokens(outcomes) == alone(model, [prompt], params())
    assert outcomes[0].num_cached_tokens == num_full(prompt)


@pytest.mark.parametrize("length", [4 * BLOCK_SIZE + 1, 5 * BLOCK_SIZE - 1])
def test_a_pool_of_exactly_the_prompts_blocks(model: Path, tmp_path: Path, length: int) -> None:
    prompts = [prompt_of(length, seed) for seed in range(3)]
    fill(model, files(tmp_path), prompts)
    sampling = params(max_tokens=5 * BLOCK_SIZE - length)
    with kv_engine(model, files(tmp_path), kv_cache_memory_bytes=6 * BLOCK_NBYTES) as engine:
        assert engine.statistics().kv_blocks_total == 5
        outcomes = engine.generate(prompts, sampling)
        assert engine.statistics().external_loaded_tokens == sum(map(num_full, prompts))
    assert tokens(outcomes) == alone(model, prompts, sampling)


def test_prompts_for_which_the_pool_is_too_small(model: Path, tmp_path: Path) -> None:
    """Some wait with loaded blocks, some lose them again, some are preempted; nobody waits for ever."""
    prompts = [prompt_of(length, seed) for seed in range(6) for length in (40, 70, 100)]
    fill(model, files(tmp_path), prompts)
    sampling = params("seeded", max_tokens=40)
    with kv_engine(model, files(tmp_path), kv_cache_memory_bytes=15 * BLOCK_NBYTES) as engine:
        outcomes = engine.generate(prompts, sampling)
        assert engine.statistics().num_preemptions > 0
        assert engine.statistics().external_loaded_tokens > 0
    assert tokens(outcomes) == alone(model, prompts, sampling)


def test_choices_share_what_was_loaded(model: Path, tmp_path: Path) -> None:
    prompt = prompt_of(70)
    fill(model, files(tmp_path), [prompt])
    with kv_engine(model, files(tmp_path)) as engine:
        outcomes = engine.generate([prompt], params("seeded", n=4))
        assert engine.statistics().external_loaded_tokens == num_full(prompt), "once for all of them"
    assert tokens(outcomes) == alone(model, [prompt], params("seeded", n=4))


def test_fifty_equal_prompts_on_an_empty_store_are_computed_once(model: Path, tmp_path: Path) -> None:
    prompt = prompt_of(100)
    sampling = params(max_tokens=4)
    with kv_engine(model, files(tmp_path), max_num_seqs=16) as engine:
        outcomes = engine.generate([prompt] * 50, sampling)
        statistics = engine.statistics()
    assert tokens(outcomes) == alone(model, [prompt], sampling) * 50
    num_computed = statistics.prompt_tokens - statistics.prefix_hit_tokens
    assert num_computed == len(prompt) + 49 * (len(prompt) - num_full(prompt))
    assert statistics.external_loaded_tokens == 0


def test_fifty_equal_prompts_are_loaded_once(model: Path, tmp_path: Path) -> None:
    prompt = prompt_of(100)
    fill(model, files(tmp_path), [prompt])
    with kv_engine(model, files(tmp_path), max_num_seqs=16) as engine:
        outcomes = engine.generate([prompt] * 50, params(max_tokens=4))
        assert engine.statistics().external_loaded_tokens == num_full(prompt)
    assert tokens(outcomes) == alone(model, [prompt], params(max_tokens=4)) * 50
    assert {outcome.num_cached_tokens for outcome in outcomes} == {num_full(prompt)}


def test_host_memory_keeps_what_the_cache_has_no_room_for(model: Path) -> None:
    prompts = [prompt_of(70, seed) for seed in range(6)]
    with kv_engine(model, {"kv_connector": "memory"}, kv_cache_memory_bytes=13 * BLOCK_NBYTES) as engine:
        for _ in range(2):
            outcomes = [engine.generate([prompt], params())[0] for prompt in prompts]
            engine.settle()
        statistics = engine.statistics()
    assert tokens(outcomes) == alone(model, prompts, params())
    assert [outcome.num_cached_tokens for outcome in outcomes] == [num_full(prompt) for prompt in prompts]
    assert statistics.external_loaded_tokens > 3 * num_full(prompts[0])


def test_generated_blocks_are_saved_too(model: Path, tmp_path: Path) -> None:
    prompt = prompt_of(20)
    with kv_engine(model, files(tmp_path)) as engine:
        first = engine.generate([prompt], params(max_tokens=50))[0].only.token_ids
    with kv_engine(model, files(tmp_path)) as engine:
        outcome = engine.generate([[*prompt, *first]], params())[0]
    assert outcome.num_cached_tokens == num_full([*prompt, *first])
    assert tokens([outcome]) == alone(model, [[*prompt, *first]], params())


def test_an_engine_that_stops_at_once_has_saved_its_blocks(model: Path, tmp_path: Path) -> None:
    prompt = prompt_of(100)
    with engine_on(model, DEVICE, kv_transfer_config=files(tmp_path)) as engine:
        engine.generate([prompt], params(max_tokens=1))
    with kv_engine(model, files(tmp_path)) as engine:
        assert engine.generate([prompt], params())[0].num_cached_tokens == num_full(prompt)


def test_the_log_says_where_kv_goes(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with engine_on(model, DEVICE, kv_transfer_config={"kv_connector": "tcp"}, role="prefill"):
        pass
    assert "role prefill, kv_producer of connector tcp" in caplog.messages
    assert re.search(r"KV is served to other nodes at 127\.0\.0\.1:\d+", caplog.text)


def test_other_weights_share_nothing(model: Path, tmp_path: Path) -> None:
    prompt = prompt_of(100)
    other = build_tiny_model(tmp_path / "other", seed=1)
    fill(model, files(tmp_path / "kv"), [prompt])
    with kv_engine(other, files(tmp_path / "kv")) as engine:
        outcome = engine.generate([prompt], params())[0]
        assert engine.statistics().external_loaded_tokens == 0
    assert tokens([outcome]) == alone(other, [prompt], params())
