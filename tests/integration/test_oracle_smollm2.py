"""The default model's greedy answers equal transformers' own: a few quickly, all 50 in the full tier."""

import random

import pytest
import torch

from server.errors import ModelError
from server.model.resolve import pull
from server.request import SamplingParams
from tests.fakes.engine_under_test import engine_on, ngram
from tests.fakes.oracle import Oracle, ask_transformers

LIMIT = 320
BLOCK_NBYTES = 30 * 3 * 2 * 64 * 4 * 16  # layers, KV heads, K and V, head size, bytes, tokens
QUICK_PROMPTS = (12, 24)


def oracle_for(device: str, chosen: tuple[int, ...], max_tokens: int, *, num_threads: int = 1) -> Oracle:
    try:
        folder = pull("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"no default model here: {error}")

    def guess(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
        with engine_on(
            folder,
            device,
            num_threads=num_threads,
            max_model_len=LIMIT,
            max_num_seqs=16,
            kv_cache_memory_bytes=256 << 20,
        ) as engine:
            return [outcome.only.token_ids for outcome in engine.generate(prompts, params)]

    return ask_transformers(folder, device, limit=LIMIT, max_tokens=max_tokens, chosen=chosen, guess=guess)


def test_a_few_prompts_with_drafts_accepted(device_name: str) -> None:
    oracle = oracle_for(device_name, QUICK_PROMPTS, 10)
    with engine_on(
        oracle.folder,
        device_name,
        max_model_len=LIMIT,
        kv_cache_memory_bytes=64 << 20,
        pipeline_depth=1,
        speculative_config=ngram(4, 2, 4),
    ) as engine:
        oracle.check(engine)
        assert sum(engine.statistics().accepted_tokens_per_position) > 0
    assert oracle.forks.num_forks == 0


@pytest.fixture(scope="module")
def oracle(device_name: str) -> Oracle:
    torch.set_num_threads(2)
    return oracle_for(device_name, tuple(range(50)), 48, num_threads=2)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("k", [0, 1, 3, 5, 8])
def test_mixed_batches_with_random_arrival_and_prefix_hits(
    oracle: Oracle, device_name: str, k: int, depth: int
) -> None:
    with engine_on(
        oracle.folder,
        device_name,
        num_threads=2,
        max_model_len=LIMIT,
        max_num_seqs=16,
        kv_cache_memory_bytes=256 << 20,
        pipeline_depth=depth,
        speculative_config=ngram(k, 2, 4) if k else None,
    ) as engine:
        oracle.check(engine, random.Random(k))
        before = engine.statistics()
        assert sum(before.accepted_tokens_per_position) > 0 or k == 0
        if k in (0, 5):
            oracle.check(engine, random.Random(k + 1))
            assert engine.statistics().prefix_hit_tokens > before.prefix_hit_tokens + 1000


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("k", "depth"), [(0, 1), (3, 0)])
def test_chunked_prefill(oracle: Oracle, device_name: str, k: int, depth: int) -> None:
    with engine_on(
        oracle.folder,
        device_name,
        num_threads=2,
        max_model_len=LIMIT,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        kv_cache_memory_bytes=64 << 20,
        pipeline_depth=depth,
        speculative_config=ngram(k, 2, 4) if k else None,
    ) as engine:
        oracle.check(engine)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("k", "depth"), [(0, 0), (5, 1)])
def test_preemption(oracle: Oracle, device_name: str, k: int, depth: int) -> None:
    with engine_on(
        oracle.folder,
        device_name,
        num_threads=2,
        max_model_len=LIMIT,
        max_num_seqs=16,
        kv_cache_memory_bytes=(LIMIT // 16 + 4) * BLOCK_NBYTES,
        watermark=0.0,
        pipeline_depth=depth,
        speculative_config=ngram(k, 2, 4) if k else None,
    ) as engine:
        oracle.check(engine, random.Random(depth))
        assert engine.statistics().num_preemptions > 0


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_alone(oracle: Oracle, device_name: str) -> None:
    with engine_on(
        oracle.folder,
        device_name,
        num_threads=2,
        max_model_len=LIMIT,
        max_num_seqs=1,
        kv_cache_memory_bytes=64 << 20,
        speculative_config=ngram(5, 2, 4),
    ) as engine:
        oracle.check(engine)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_ties_are_rare(oracle: Oracle) -> None:
    """After everything above: what differs is a tie, and there is one in 10,000 tokens at most."""
    assert oracle.forks.num_forks * 10_000 <= max(oracle.forks.num_tokens, 10_000)
