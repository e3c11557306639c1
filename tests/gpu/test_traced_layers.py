"""Compiled decoder layers on CUDA, replayed and not."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters

from proposers.draft_model import DraftModelConfig
from proposers.eagle import Eagle3Config
from server.composition import target
from server.model.traced_layers import trace_layers
from server.request import Request, SamplingParams
from tests.fakes.engine_under_test import engine_on, ngram
from tests.fakes.stepping import Stepping
from tests.fakes.tracing import nothing_traced
from tests.gpu.test_graphs import GREEDY, PLAIN
from tests.gpu.test_step import DEVICE, MIXED, NUM_TOKENS, no_waiting, requests
from tests.tiny_heads import build_tiny_eagle3
from tests.tiny_model import build_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # inductor's own imports
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("traced"), num_layers=3)


@pytest.fixture(autouse=True)
def _nothing_traced() -> Iterator[None]:
    with nothing_traced():
        yield


def compiled(folder: Path, dtype: torch.dtype, **options: Any) -> Stepping:
    stepping = Stepping(folder, DEVICE, dtype, is_compiled=True, **options)
    assert stepping.is_compiled
    return stepping


def traced_answers(folder: Path, capture: Sequence[int], options: dict[str, Any]) -> tuple[Stepping, list[list[int]]]:
    """What compiled code makes of some requests, captured for batches of these sizes if any; nothing compiles then."""
    stepping = compiled(folder, torch.float32, **options)
    with torch.compiler.set_stance("fail_on_recompile"):
        if capture:
            stepping.runner.capture(capture)
        return stepping, stepping.generate(requests(PLAIN, 19))


@pytest.mark.parametrize("k", [0, 3])
def test_tokens_are_those_of_the_model_s_own_layers(folder: Path, k: int) -> None:
    """Padded batches, chunks of prompts and mixed steps, by two versions of code: nothing is compiled later."""
    options: dict[str, Any] = {"k": k, "depth": 1, "max_num_seqs": 5, "max_num_partial_prefills": 2}
    expected = Stepping(folder, DEVICE, torch.float32, **options).generate(requests(PLAIN, 19))
    for capture in ((), (1, 2, 4, 5)):
        _, found = traced_answers(folder, capture, options)
        assert found == expected
    assert counters["stats"]["unique_graphs"] == 2


def test_a_full_bucket_equals_an_eager_batch_to_the_bit(folder: Path) -> None:
    made = [
        Request(request_id=str(i), prompt_token_ids=tuple(range(5 + i, 15 + i)) * 7, sampling=GREEDY) for i in range(4)
    ]
    answers = []
    for capture in ((), (4,)):
        stepping = compiled(folder, torch.bfloat16, capture=capture, max_num_seqs=4)
        answers.append(stepping.generate(made))
    assert answers[0] == answers[1]


def test_no_step_waits_for_the_device(folder: Path) -> None:
    stepping = compiled(folder, torch.bfloat16, k=3, depth=1, capture=(1, 2, 4, 6), max_num_seqs=6)
    stepping.generate(requests(MIXED, 12, has_bad_words=True))
    with no_waiting():
        assert all(stepping.generate(requests(MIXED, 18, has_bad_words=True)))


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_networks_that_draft_are_compiled_with_the_target(folder: Path, tmp_path: Path, method: str) -> None:
    """Eager and captured, with padded batches and prompts in chunks; nothing is compiled later."""
    config: Eagle3Config | DraftModelConfig = DraftModelConfig(method=method, model=str(folder))
    if method == "eagle3":
        config = Eagle3Config(method=method, model=str(build_tiny_eagle3(tmp_path)))
    options: dict[str, Any] = {"k": 3, "depth": 1, "max_num_seqs": 5, "max_num_partial_prefills": 2}
    options["build"] = lambda target: [config.model_copy(update={"num_speculative_tokens": 3}).build(target)]
    plain = Stepping(folder, DEVICE, torch.float32, **options)
    expected = plain.generate(requests(PLAIN, 19))
    for capture in ((), (1, 2, 4, 5)):
        stepping, found = traced_answers(folder, capture, options)
        assert found == expected
        drafted, wanted = stepping.scheduler.statistics(), plain.scheduler.statistics()
        assert drafted.accepted_tokens_per_position == wanted.accepted_tokens_per_position
    assert counters["stats"]["unique_graphs"] <= (8 if method == "eagle3" else 4)


def test_a_server_compiles_before_it_serves(folder: Path) -> None:
    """And nothing afterwards."""
    settings: dict[str, Any] = {"enforce_eager": False, "max_num_seqs": 4, "speculative_config": ngram(3)}
    prompts = [[5, 6, 7] * length for length in (1, 2, 30)]
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = []
    for when in ("none", "wait", "auto"):
        with (
            patch.object(target, "trace_layers", side_effect=trace_layers) as trace,
            engine_on(folder, "cuda", compile=when, **settings) as engine,
        ):
            assert trace.call_count == (when != "none")
            with torch.compiler.set_stance("fail_on_recompile"):
                found.append([outcome.only.token_ids for outcome in engine.generate(prompts, sampling)])
    assert found[0] == found[1] == found[2]
    assert counters["stats"]["unique_graphs"] == 2
