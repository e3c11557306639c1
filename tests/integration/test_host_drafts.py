"""Drafts that are made on the host: from settled tokens, at every pipeline depth."""

import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from server.request import Request, SamplingParams, SpeculationOptions
from tests.fakes.engine_under_test import engine_on
from tests.fakes.scripted_host_proposer import ScriptedHostProposer
from tests.fakes.stepping import Stepping
from tests.tiny_model import build_tiny_model

K = 3
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def texts(folder: Path, device_name: str) -> list[list[int]]:
    """Prompts of 6 tokens with their answers."""
    rng = random.Random(1)
    prompts = [[first, *(rng.randrange(3, 400) for _ in range(5))] for first in range(10, 22)]
    with engine_on(folder, device_name) as engine:
        outcomes = engine.generate(prompts, GREEDY)
    return [prompt + outcome.only.token_ids for prompt, outcome in zip(prompts, outcomes, strict=True)]


@pytest.mark.parametrize("depth", [0, 1])
def test_right_drafts_are_all_accepted(folder: Path, device_name: str, texts: list[list[int]], depth: int) -> None:
    proposer = ScriptedHostProposer(K, texts)
    with engine_on(folder, device_name, proposer=proposer, pipeline_depth=depth, max_num_seqs=4) as engine:
        outcomes = engine.generate([text[:6] for text in texts], GREEDY, arrivals=random.Random(2))
        statistics = engine.statistics()
    assert [outcome.only.token_ids for outcome in outcomes] == [text[6:] for text in texts]
    assert statistics.accepted_tokens_per_position == statistics.draft_tokens_per_position
    for outcome in outcomes:  # one token from the prompt, then K + 1 with each step
        assert outcome.only.end.speculation.num_spec_steps == -(-(NUM_TOKENS - 1) // (K + 1))


def test_only_who_is_drafted_for_waits(folder: Path, device_name: str, texts: list[list[int]]) -> None:
    """One step is launched ahead: of the sequence without drafts every one, of the other every second one."""
    proposer = ScriptedHostProposer(K, texts)
    stepping = Stepping(folder, torch.device(device_name), torch.float32, k=K, depth=1, proposer=proposer)
    drafted, plain = (
        Request(request_id=str(i), prompt_token_ids=tuple(text[:6]), sampling=GREEDY)
        for i, text in enumerate(texts[:2])
    )
    stepping.scheduler.add(drafted)
    stepping.scheduler.add(replace(plain, speculation=SpeculationOptions(enabled=False)))
    plans = [stepping.step() for _ in range(8)]
    assert [[row.num_query for row in plan.rows] for plan in plans if plan is not None] == [
        [6, 6],
        [1],
        *([1 + K, 1], [1]) * 3,
    ]
    while stepping.scheduler.has_requests:
        stepping.step()
    tokens = {i: [t for o in stepping.outputs if o.request_id == str(i) for t in o.token_ids] for i in range(2)}
    assert tokens == {i: texts[i][6:] for i in range(2)}


def test_what_is_no_token_is_cut_off(folder: Path, device_name: str, texts: list[list[int]]) -> None:
    for nonsense in ([-1, 5], [1 << 40], [5] * 100):
        proposer = ScriptedHostProposer(K, texts, nonsense=nonsense)
        with engine_on(folder, device_name, proposer=proposer) as engine:
            assert engine.generate([texts[0][:6]], GREEDY)[0].only.token_ids == texts[0][6:]


def test_a_proposer_that_fails_harms_nobody(
    folder: Path, device_name: str, texts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    proposer = ScriptedHostProposer(K, texts)
    proposer.fails_after = 12
    with caplog.at_level(logging.ERROR), engine_on(folder, device_name, proposer=proposer) as engine:
        outcomes = engine.generate([text[:6] for text in texts[:3]], GREEDY)
        statistics = engine.statistics()
    assert [outcome.only.token_ids for outcome in outcomes] == [text[6:] for text in texts[:3]]
    assert 0 < sum(statistics.accepted_tokens_per_position) < 3 * K * 3
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["ScriptedHostProposer failed; it drafts no more for one sequence"] * 3


def test_after_a_preemption_the_text_is_known_again(folder: Path, device_name: str, texts: list[list[int]]) -> None:
    block_nbytes = 2 * 2 * 2 * 16 * 4 * 16  # layers, KV heads, K and V, head size, bytes, tokens
    proposer = ScriptedHostProposer(K, texts)
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 6 * block_nbytes, "watermark": 0.0, "max_model_len": 48}
    with engine_on(folder, device_name, proposer=proposer, pipeline_depth=1, **settings) as engine:
        outcomes = engine.generate([text[:6] for text in texts], GREEDY)
        statistics = engine.statistics()
    assert [outcome.only.token_ids for outcome in outcomes] == [text[6:] for text in texts]
    assert statistics.num_preemptions > 0
    assert statistics.accepted_tokens_per_position == statistics.draft_tokens_per_position
