"""Networks that draft are traced where the target is; on the CPU with plain tensors, as on CUDA but for the kernels."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from proposers.base import TargetView
from proposers.draft_model import DraftModelConfig
from proposers.eagle import Eagle3Config, EagleConfig
from proposers.eagle_body import EagleBody
from server.kernels import cpu_attention
from tests.fakes.stepping import Stepping
from tests.fakes.tracing import nothing_traced, requests
from tests.tiny_heads import build_tiny_eagle, build_tiny_eagle3
from tests.tiny_model import build_tiny_model

CPU = torch.device("cpu")
K = 3


@pytest.fixture(autouse=True)
def _plain_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No C++ operators, and a tracer that remembers nothing."""
    monkeypatch.setattr(cpu_attention, "load", lambda _: False)
    for name in ("eagle_network", "draft_model"):
        monkeypatch.setattr(f"proposers.{name}.can_pack", lambda _: False)
    with nothing_traced():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("traced-drafts"), num_layers=2)


def settings(method: str, folder: Path, tmp_path: Path) -> Any:
    """Of a proposer with K drafts."""
    match method:
        case "eagle":
            return EagleConfig(method=method, model=str(build_tiny_eagle(tmp_path)), num_speculative_tokens=K)
        case "eagle3":
            return Eagle3Config(method=method, model=str(build_tiny_eagle3(tmp_path)), num_speculative_tokens=K)
    return DraftModelConfig(method=method, model=str(folder), num_speculative_tokens=K)


def stepping_with(build: Callable[[TargetView], Any], folder: Path, *, is_compiled: bool) -> Stepping:
    batch: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    made = Stepping(folder, CPU, torch.float32, k=K, is_compiled=is_compiled, build=lambda t: [build(t)], **batch)
    assert made.is_compiled == is_compiled
    return made


@pytest.mark.parametrize(
    ("method", "num_graphs"),
    [
        ("eagle3", 8),
        pytest.param("eagle", 8, marks=pytest.mark.full),
        pytest.param("draft_model", 4, marks=pytest.mark.full),
    ],
)
def test_drafts_are_those_of_the_network_s_own_code(folder: Path, tmp_path: Path, method: str, num_graphs: int) -> None:
    """Prefill in chunks, catching up and drafting: by two versions of each part, and nothing is compiled later."""
    build = settings(method, folder, tmp_path).build
    expected = stepping_with(build, folder, is_compiled=False)
    answers = expected.generate(requests(7)) + expected.generate(requests(1))
    found = stepping_with(build, folder, is_compiled=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert found.generate(requests(7)) + found.generate(requests(1)) == answers
    drafted = [each.scheduler.statistics() for each in (expected, found)]
    assert drafted[0].accepted_tokens_per_position == drafted[1].accepted_tokens_per_position
    assert sum(drafted[1].draft_tokens_per_position) > 0
    assert counters["stats"]["unique_graphs"] == num_graphs


def test_a_head_that_cannot_be_traced_runs_as_it_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build = settings("eagle3", folder, tmp_path).build
    expected = stepping_with(build, folder, is_compiled=False).generate(requests(7))
    condense = EagleBody.condense

    def untraceable(body: EagleBody, features: Tensor) -> Tensor:
        condensed = condense(body, features)
        return condensed if float(condensed.sum()) > -1e9 else features

    monkeypatch.setattr(EagleBody, "condense", untraceable)
    caplog.set_level(logging.INFO)
    found = stepping_with(build, folder, is_compiled=True)
    assert [record.levelname for record in caplog.records if "draft head" in record.message] == ["WARNING"]
    assert found.generate(requests(7)) == expected
