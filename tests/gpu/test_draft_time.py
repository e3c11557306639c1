"""The time of drafts on a device, of captured steps included."""

from pathlib import Path
from typing import Any

import pytest
import torch

from server.request import SamplingParams
from server.worker.draft_time import begin_span
from tests.fakes.engine_under_test import engine_on, ngram
from tests.tiny_model import build_tiny_model

pytestmark = pytest.mark.gpu


def test_each_replay_of_a_graph_is_timed_anew() -> None:
    device = torch.device("cuda")
    factor = torch.randn(4096, 4096, device=device)
    product = torch.empty_like(factor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        span = begin_span(device)
        for _ in range(8):
            torch.mm(factor, factor, out=product)
        span.end()
    seconds = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        seconds.append(span.seconds())
    assert all(0 < each < 1 for each in seconds)
    assert len(set(seconds)) > 1, "each replay has a time of its own"


def test_reading_does_not_wait() -> None:
    device = torch.device("cuda")
    span = begin_span(device)
    torch.cuda._sleep(1_000_000_000)
    span.end()
    assert span.seconds() == 0.0, "it is under way"
    torch.cuda.synchronize()
    assert span.seconds() > 0.01


@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_the_server_knows_the_time_of_drafts(tmp_path: Path, is_eager: bool, depth: int) -> None:
    settings: dict[str, Any] = {"enforce_eager": is_eager, "pipeline_depth": depth, "kv_cache_memory_bytes": 16 << 20}
    with engine_on(build_tiny_model(tmp_path), "cuda", speculative_config=ngram(3), **settings) as engine:
        sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, allowed_token_ids=(5, 6, 7))
        outcome = engine.generate([[5, 6, 7] * 5], sampling)[0]
        statistics = engine.statistics()
    steps = outcome.only.end.speculation.num_spec_steps
    assert statistics.num_draft_steps >= statistics.num_verify_steps >= steps > 0
    assert 0 < statistics.draft_seconds < statistics.verify_seconds
