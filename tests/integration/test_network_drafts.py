"""Drafts of a network that is the target itself: whatever it keeps of a sequence must be right, or they differ."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import proposers.drafting
from server.request import SamplingParams
from server.speculation_state import SpeculationChange
from tests.fakes.engine_under_test import EngineUnderTest, Outcome, engine_on
from tests.tiny_model import build_tiny_model

K = 4
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("target"))


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in LENGTHS]


def params(**more: Any) -> list[SamplingParams]:
    """Greedy, seeded, and neither, by turns."""
    kinds: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8})
    turns = itertools.islice(itertools.cycle(kinds), len(LENGTHS))
    return [SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **kind, **more}) for kind in turns]


def itself(folder: Path, **settings: object) -> dict[str, Any]:
    return {
        "speculative_config": {"method": "draft_model", "model": str(folder), "num_speculative_tokens": K, **settings},
        "speculation_metrics": "detailed",
    }


def rejections(outcomes: Sequence[Outcome]) -> list[tuple[int, ...]]:
    """Of each choice, how many drafts each of its steps refused."""
    found = []
    for outcome in outcomes:
        for choice in outcome.choices:
            stats = choice.end.speculation
            assert stats.num_spec_steps > 0
            pairs = zip(stats.proposed_per_step, stats.accepted_per_step, strict=True)
            found.append(tuple(proposed - accepted for proposed, accepted in pairs))
    return found


def tokens(outcomes: Sequence[Outcome], *, but: int = 3) -> list[list[int]]:
    """Of the requests whose tokens are fixed: all but each third."""
    return [choice.token_ids for i, each in enumerate(outcomes) if i % 3 != but - 1 for choice in each.choices]


@pytest.fixture(scope="module")
def expected(folder: Path, device_name: str) -> list[list[int]]:
    with engine_on(folder, device_name) as engine:
        return tokens(engine.generate(prompts(), params()))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [2048, 24], ids=["whole prompts", "chunks"])
def test_every_draft_is_kept(
    folder: Path, device_name: str, expected: list[list[int]], depth: int, budget: int
) -> None:
    """In new slots and used ones, behind computed prompts and cached ones, at every place in a block."""
    settings: dict[str, Any] = {"pipeline_depth": depth, "max_num_batched_tokens": budget, "max_num_seqs": 4}
    with engine_on(folder, device_name, **itself(folder), **settings) as engine:
        first, again = (engine.generate(prompts(), params()) for _ in range(2))
    assert any(outcome.num_cached_tokens for outcome in again)
    for outcomes in (first, again):
        assert tokens(outcomes) == expected
        assert not any(any(steps) for steps in rejections(outcomes))


def test_choices_share_what_both_networks_keep_of_the_prompt(folder: Path, device_name: str) -> None:
    sampling = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, seed=1, n=4)]
    with engine_on(folder, device_name) as engine:
        plain = engine.generate([prompts()[-1]], sampling)
    with engine_on(folder, device_name, **itself(folder)) as engine:
        outcomes = engine.generate([prompts()[-1]], sampling)
    assert tokens(outcomes) == tokens(plain)
    assert not any(any(steps) for steps in rejections(outcomes))


def test_preempted_sequences_go_on_drafting(folder: Path, device_name: str, expected: list[list[int]]) -> None:
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 420_000, "max_num_seqs": 8}
    with engine_on(folder, device_name, **itself(folder), **settings) as engine:
        outcomes = engine.generate(prompts(), params())
        assert engine.statistics().num_preemptions > 0
    assert tokens(outcomes) == expected
    assert sum(map(sum, rejections(outcomes))) <= 0.1 * sum(
        choice.end.speculation.num_draft_tokens for outcome in outcomes for choice in outcome.choices
    )


class Switch:
    """Turns speculation off and on again, counted in events."""

    def __init__(self, engine: EngineUnderTest, off_at: int, on_at: int) -> None:
        self._engine, self._off_at, self._on_at = engine, off_at, on_at
        self._num_events = 0

    async def __call__(self) -> None:
        self._num_events += 1
        if self._num_events in (self._off_at, self._on_at):
            change = SpeculationChange(enabled=self._num_events == self._on_at)
            await self._engine.core.engine.set_speculation(change)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("most", [2048, 50], ids=["at once", "bit by bit"])
def test_sequences_catch_up_after_an_off_period(
    folder: Path, device_name: str, monkeypatch: pytest.MonkeyPatch, depth: int, most: int
) -> None:
    """Also those whose prompt came while drafts were off; they get drafts again once all is made up for."""
    monkeypatch.setitem(proposers.drafting.CATCH_UP, device_name.partition(":")[0], most)
    sampling = params(max_tokens=120)
    with engine_on(folder, device_name) as engine:
        plain = engine.generate(prompts(), sampling)
    with engine_on(folder, device_name, **itself(folder), pipeline_depth=depth, max_num_seqs=8) as engine:
        outcomes = engine.generate(prompts(), sampling, on_event=Switch(engine, off_at=12, on_at=250))
    assert tokens(outcomes) == tokens(plain)
    assert not any(any(steps) for steps in rejections(outcomes))
    assert all(sum(choice.end.speculation.accepted_per_step[-3:]) >= 2 * K for o in outcomes for choice in o.choices)


def test_drafts_end_where_the_context_does(folder: Path, device_name: str) -> None:
    sampling = [SamplingParams(max_tokens=30, ignore_eos=True, temperature=0)] * 2
    texts = [prompts()[-1][:40], prompts()[-1][:60]]
    with engine_on(folder, device_name) as engine:
        plain = engine.generate(texts, sampling)
    configs = {**itself(folder), "max_model_len": 90}, itself(folder, max_model_len=64)
    for config in configs:
        with engine_on(folder, device_name, **config) as engine:
            outcomes = engine.generate(texts, sampling)
        assert tokens(outcomes) == tokens(plain)
        assert not any(any(steps) for steps in rejections(outcomes))
    short, long = (outcome.only.end.speculation.num_draft_tokens for outcome in outcomes)
    assert 64 - 40 - K <= short <= 64 - 40 + 1
    assert long <= 5


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("method", ["draft_model", "layer_skip"])
def test_drafts_end_where_the_cache_does(folder: Path, device_name: str, method: str, depth: int) -> None:
    """A request that fills a cache shorter than either model's context, to the last position of its last block."""
    sampling = SamplingParams(max_tokens=46, ignore_eos=True, temperature=0)
    chosen = {"model": str(folder)} if method == "draft_model" else {"num_layers": 1}
    config = {"method": method, "num_speculative_tokens": K, **chosen}
    nbytes = 7 * 16 * 2 * 2 * 2 * 16 * 4 * (2 if method == "draft_model" else 1)
    cache: dict[str, Any] = {"pipeline_depth": depth, "kv_cache_memory_bytes": nbytes}
    with engine_on(folder, device_name) as engine:
        plain = engine.generate([prompts()[-1][:50]], sampling)
    with engine_on(folder, device_name, speculative_config=config, **cache) as engine:
        assert engine.core.engine.model_info.max_request_len == 96
        outcomes = engine.generate([prompts()[-1][:50]], sampling)
        assert sum(engine.statistics().draft_tokens_per_position) > 0
    assert outcomes[0].only.token_ids == plain[0].only.token_ids


def test_a_draft_that_is_not_a_number_is_none(
    tmp_path: Path, folder: Path, device_name: str, expected: list[list[int]]
) -> None:
    """Behind this token, the first that the first request gets, the draft model makes nothing but NaN."""
    poison = expected[0][0]
    poisoned = build_tiny_model(tmp_path / "poisoned", poison_token_id=poison)
    with engine_on(folder, device_name, **itself(poisoned)) as engine:
        outcomes = engine.generate(prompts(), params(max_tokens=3))
    assert [len(outcome.only.token_ids) for outcome in outcomes] == [3] * len(LENGTHS)
    num_steps = [outcome.only.end.speculation.num_spec_steps for outcome in outcomes]
    assert num_steps == [int(outcome.only.token_ids[0] != poison) for outcome in outcomes]
