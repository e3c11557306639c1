"""Captured steps do what eager ones do."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from scipy import stats

from server.composition import kv_cache, model_info
from server.kernels.rejection import Method
from server.request import Request, SamplingParams
from server.worker.graphs import StepGraphs
from tests.fakes.engine_under_test import engine_on, ngram
from tests.fakes.scripted_host_proposer import ScriptedHostProposer
from tests.fakes.scripted_proposer import ScriptedProposer
from tests.fakes.stepping import Stepping
from tests.gpu.test_step import DEVICE, MIXED, NUM_TOKENS, requests
from tests.tiny_model import build_tiny_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=3, max_tokens=NUM_TOKENS)
PLAIN = (GREEDY, SEEDED, *MIXED[:2], MIXED[3])
"""Whom the second segment can serve as well; unseeded ones have keys of their own in each run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("graphs"))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("kind", ["plain", "mixed"])
def test_tokens_are_those_of_eager_steps(folder: Path, k: int, depth: int, kind: str) -> None:
    """More requests than seats, of different lengths: padded batches, rows that end, slots used again."""
    params = PLAIN if kind == "plain" else (*PLAIN, *MIXED[4:])
    answers = []
    for capture in ((), (1, 2, 4, 5)):
        stepping = Stepping(
            folder, DEVICE, torch.float32, k=k, depth=depth, capture=capture, max_num_seqs=5, max_num_partial_prefills=2
        )
        with patch.object(StepGraphs, "replay_second", autospec=True, side_effect=StepGraphs.replay_second) as replay:
            answers.append(stepping.generate(requests(params, 19, has_bad_words=kind == "mixed")))
        assert (replay.call_count > 10) == (bool(capture) and kind == "plain") or kind == "mixed"
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [0, 3])
def test_a_full_bucket_equals_an_eager_batch_to_the_bit(folder: Path, dtype: torch.dtype, k: int) -> None:
    """Without padding every product has the shape it has eagerly, so that even bfloat16 must agree."""
    prompts = [tuple(range(5 + i, 15 + i)) * 7 for i in range(4)]  # long enough for attention to be split alike
    answers = []
    for capture in ((), (4,)):
        stepping = Stepping(folder, DEVICE, dtype, k=k, capture=capture, max_num_seqs=4)
        answers.append(
            stepping.generate(
                [
                    Request(request_id=str(i), prompt_token_ids=prompt, sampling=(GREEDY, SEEDED)[i % 2])
                    for i, prompt in enumerate(prompts)
                ]
            )
        )
    assert answers[0] == answers[1]
    assert all(len(answer) == NUM_TOKENS for answer in answers[0])


@pytest.mark.parametrize(("k", "method"), [(0, Method.STANDARD), (3, Method.STANDARD), (3, Method.BLOCK)])
def test_unseeded_tokens_have_the_same_distribution(folder: Path, k: int, method: Method) -> None:
    """Joint frequencies of a few tokens from many requests, eager and without drafts against captured."""
    sampling = SamplingParams(temperature=1.5, top_k=3, max_tokens=4, ignore_eos=True)
    prompt = (7, 8, 9, 7, 8, 9, 7, 8)
    counts: list[Counter[tuple[int, ...]]] = []
    for capture in ((), (32, 64)):
        stepping = Stepping(
            *(folder, DEVICE, torch.float32),
            k=k if capture else 0,
            method=method,
            depth=1,
            capture=capture,
            max_num_seqs=64,
        )
        made = [Request(request_id=str(i), prompt_token_ids=prompt, sampling=sampling) for i in range(1500)]
        counts.append(Counter(tuple(tokens) for tokens in stepping.generate(made)))
    common = [key for key, count in (counts[0] + counts[1]).items() if count >= 20]
    table = [[each[key] for key in common] for each in counts]
    table = [[*row, 1500 - sum(row) + 1] for row in table]
    assert len(common) > 8
    assert stats.chi2_contingency(table).pvalue > 1e-4


def test_padding_leaves_every_other_slot_alone(folder: Path) -> None:
    """Idle slots and their blocks are as they were after a padded replay."""
    stepping = Stepping(folder, DEVICE, torch.float32, capture=(4,), max_num_seqs=8)
    batch, kv = stepping.runner.batch, stepping.runner.kv
    for tensor in (*batch.tensors(), kv):
        tensor[..., -2:] += 1  # something to spoil, in the last slots and blocks
    stepping.scheduler.add(Request(request_id="only", prompt_token_ids=(4, 5, 6), sampling=GREEDY))
    stepping.step()
    before = [tensor.clone() for tensor in (*batch.tensors(), kv)]
    stepping.step()
    token_ids, table, integers, floats, *drafts = (
        (now != then) for now, then in zip(batch.tensors(), before, strict=False)
    )
    for changed in (token_ids, table):
        assert not changed[1:-1].any()
    for changed in (integers, floats):
        assert not changed[:, 1:-1].any()
    for changed in drafts:
        assert not changed[1:-1].any()
    assert torch.equal(kv[2:], before[-1][2:]), "only the null block and the row's own may change"


def test_a_host_proposer_keeps_the_second_segment_eager(folder: Path) -> None:
    with engine_on(folder, "cuda") as engine:
        prompt = [5, 6, 7, 8]
        expected = engine.generate([prompt], GREEDY)[0].only.token_ids
    proposer = ScriptedProposer(3, [prompt + expected], error_rate=0.2)
    with engine_on(folder, "cuda", proposer=proposer, enforce_eager=False) as engine:
        assert engine.generate([prompt], GREEDY)[0].only.token_ids == expected
        assert sum(engine.statistics().accepted_tokens_per_position) > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_from_the_host_go_into_captured_steps(folder: Path, depth: int) -> None:
    prompts = [[5, 6, 7, 8], [6, 7, 8, 9], [7, 8]]
    with engine_on(folder, "cuda") as engine:
        expected = [outcome.only.token_ids for outcome in engine.generate(prompts, GREEDY)]
    proposer = ScriptedHostProposer(3, [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)])
    settings: dict[str, Any] = {
        "proposer": proposer,
        "enforce_eager": False,
        "pipeline_depth": depth,
        "max_num_seqs": 4,
    }
    with (
        patch.object(StepGraphs, "replay_second", autospec=True, side_effect=StepGraphs.replay_second) as replay,
        engine_on(folder, "cuda", **settings) as engine,
    ):
        assert [outcome.only.token_ids for outcome in engine.generate(prompts, GREEDY)] == expected
        statistics = engine.statistics()
    assert replay.call_count > 5
    assert statistics.accepted_tokens_per_position == statistics.draft_tokens_per_position


@pytest.mark.parametrize("is_eager", [True, False])
def test_enforce_eager_captures_nothing(folder: Path, is_eager: bool) -> None:
    """Otherwise the log says what the graphs take, before the KV cache is sized."""
    free, total = torch.cuda.mem_get_info()
    utilization = (total - free + 12 * 2**30) / total  # others may use the device as well
    measured: dict[str, Any] = {
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": utilization,
        "block_size": 256,
    }
    with (
        patch.object(StepGraphs, "replay_first", autospec=True, side_effect=StepGraphs.replay_first) as replay,
        patch.object(kv_cache.logger, "info") as info,
        patch.object(model_info.logger, "info", info),
        engine_on(
            folder, "cuda", enforce_eager=is_eager, speculative_config=ngram(3), max_num_seqs=4, **measured
        ) as engine,
    ):
        assert len(engine.generate([[5, 6, 7]] * 3, GREEDY)[2].only.token_ids) == NUM_TOKENS
    assert (replay.call_count == 0) == is_eager
    messages = [call.args[0] for call in info.call_args_list]
    kinds = [kind for message in messages for kind in ("CUDA graphs", "KV cache") if message.startswith(kind)]
    assert kinds == (["KV cache"] if is_eager else ["CUDA graphs", "KV cache"])
