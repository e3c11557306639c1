"""Greedy answers equal transformers' own, however they are scheduled and drafted."""

import random

import pytest

from tests.fakes.engine_under_test import engine_on, ngram
from tests.fakes.oracle import Oracle, ask_transformers
from tests.fakes.reference_model import TIE_GAP, Reference
from tests.fakes.scripted_proposer import ScriptedProposer
from tests.tiny_model import build_tiny_model

TINY_LIMIT = 192
DRAFT_COUNTS = (0, 1, 3, 5, 8)
QUICK = {(0, 0), (1, 1), (3, 0), (5, 1), (8, 0)}
MATRIX = [
    pytest.param(k, depth, marks=() if (k, depth) in QUICK else pytest.mark.full)
    for k in DRAFT_COUNTS
    for depth in (0, 1)
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, device_name: str) -> Oracle:
    folder = build_tiny_model(tmp_path_factory.mktemp("oracle"))
    return ask_transformers(folder, device_name, limit=TINY_LIMIT, max_tokens=32, chosen=range(0, 50, 2))


def speculation(k: int) -> dict[str, object] | None:
    return ngram(k) if k else None


@pytest.mark.parametrize(("k", "depth"), MATRIX)
def test_mixed_batches_with_random_arrival_and_prefix_hits(tiny: Oracle, device_name: str, k: int, depth: int) -> None:
    with engine_on(
        tiny.folder,
        device_name,
        max_model_len=TINY_LIMIT,
        max_num_seqs=16,
        pipeline_depth=depth,
        speculative_config=speculation(k),
    ) as engine:
        tiny.check(engine, random.Random(k))
        before = engine.statistics()
        assert sum(before.draft_tokens_per_position) > 0 or k == 0
        tiny.check(engine, random.Random(k + 1))  # the same prompts again: their full blocks are there
        assert engine.statistics().prefix_hit_tokens > before.prefix_hit_tokens


@pytest.mark.parametrize(("k", "depth"), [(0, 1), (3, 0), (8, 1)])
def test_chunked_prefill(tiny: Oracle, device_name: str, k: int, depth: int) -> None:
    with engine_on(
        tiny.folder,
        device_name,
        max_model_len=TINY_LIMIT,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        max_num_partial_prefills=3,
        enable_prefix_caching=False,
        pipeline_depth=depth,
        speculative_config=speculation(k),
    ) as engine:
        tiny.check(engine)
        assert engine.statistics().num_steps > sum(map(len, tiny.prompts)) // 32


@pytest.mark.parametrize(("k", "depth"), [(0, 0), (5, 1), (3, 0)])
def test_preemption(tiny: Oracle, device_name: str, k: int, depth: int) -> None:
    block_nbytes = 2 * 2 * 2 * 16 * 4 * 16  # layers, KV heads, K and V, head size, bytes, tokens
    with engine_on(
        tiny.folder,
        device_name,
        max_model_len=TINY_LIMIT,
        kv_cache_memory_bytes=(TINY_LIMIT // 16 + 3) * block_nbytes,
        watermark=0.0,
        pipeline_depth=depth,
        speculative_config=speculation(k),
    ) as engine:
        tiny.check(engine, random.Random(depth))
        assert engine.statistics().num_preemptions > 0


@pytest.mark.parametrize(("k", "depth"), [(1, 0), (4, 1), (8, 0)])
def test_drafts_that_are_mostly_right(tiny: Oracle, device_name: str, k: int, depth: int) -> None:
    proposer = ScriptedProposer(k, tiny.texts, error_rate=0.15)
    with engine_on(
        tiny.folder, device_name, proposer=proposer, max_model_len=TINY_LIMIT, max_num_seqs=16, pipeline_depth=depth
    ) as engine:
        tiny.check(engine, random.Random(k))
        statistics = engine.statistics()
        accepted, drafted = statistics.accepted_tokens_per_position, statistics.draft_tokens_per_position
        assert all(0 < a < d for a, d in zip(accepted, drafted, strict=True))


@pytest.mark.parametrize("wrong", [None, 0, 5, 11])
def test_the_oracle_takes_no_guess_on_trust(tiny: Oracle, device_name: str, wrong: int | None) -> None:
    reference, prompt = Reference(tiny.folder, device_name), tiny.prompts[1]
    right = reference.greedy(prompt, 12)
    guess = [token_id if i != wrong else token_id - 1 for i, token_id in enumerate(right.token_ids)]
    found = reference.confirm(prompt, guess)
    assert found.token_ids == right.token_ids
    assert found.gaps == pytest.approx(right.gaps, abs=TIE_GAP)


def test_alone(tiny: Oracle, device_name: str) -> None:
    with engine_on(
        tiny.folder, device_name, max_model_len=TINY_LIMIT, max_num_seqs=1, speculative_config=ngram(3)
    ) as engine:
        tiny.check(engine)
        assert engine.statistics().num_steps > 0


def test_ties_are_rare(tiny: Oracle) -> None:
    """After everything above: what differs is a tie, and there is one in 10,000 tokens at most."""
    assert tiny.forks.num_forks * 10_000 <= max(tiny.forks.num_tokens, 10_000)
