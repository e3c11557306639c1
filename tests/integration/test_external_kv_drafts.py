"""What drafting networks keep for a block comes with it, where both engines draft with the same one."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from proposers.drafting import NetworkProposer
from server.request import SamplingParams
from tests.fakes.device import DEVICE
from tests.fakes.engine_under_test import Outcome, engine_on, ngram
from tests.fakes.kv_engines import BLOCK_SIZE, files, fill, kv_engine, num_full, tokens
from tests.tiny_heads import build_tiny_eagle3
from tests.tiny_model import build_tiny_model

K = 3
LENGTHS = (17, 40, 100, 150)
METHODS = ("none", "ngram", "draft_model", "eagle3")
SAMPLING = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


class Models:
    """A target, and what may draft for it."""

    def __init__(self, folder: Path) -> None:
        self.target = build_tiny_model(folder / "target")
        head = build_tiny_eagle3(folder / "head")
        other = build_tiny_model(folder / "other", seed=3)
        self._speculative: dict[str, dict[str, Any] | None] = {
            "none": None,
            "ngram": ngram(K),
            "draft_model": {"method": "draft_model", "model": str(self.target), "num_speculative_tokens": K},
            "other draft_model": {"method": "draft_model", "model": str(other), "num_speculative_tokens": K},
            "eagle3": {"method": "eagle3", "model": str(head), "num_speculative_tokens": K},
        }

    def settings(self, method: str) -> dict[str, Any]:
        return {"speculative_config": self._speculative[method], "speculation_metrics": "detailed"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def plain(models: Models, prompts: list[list[int]]) -> list[list[int]]:
    with engine_on(models.target, DEVICE) as engine:
        return tokens(engine.generate(prompts, SAMPLING))


@pytest.fixture
def adopted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks that came with all that a drafting network keeps for them."""
    blocks: list[int] = []
    adopt = NetworkProposer.adopt

    def recorded(self: NetworkProposer, block_ids: Sequence[int]) -> None:
        blocks.extend(block_ids)
        adopt(self, block_ids)

    monkeypatch.setattr(NetworkProposer, "adopt", recorded)
    return blocks


def acceptance(outcomes: Sequence[Outcome]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of each request, drafts of each step and how many of them were kept."""
    stats = [outcome.only.end.speculation for outcome in outcomes]
    return [(each.proposed_per_step, each.accepted_per_step) for each in stats]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_what_the_same_draft_keeps_is_loaded_too(
    models: Models,
    prompts: list[list[int]],
    plain: list[list[int]],
    tmp_path: Path,
    adopted: list[int],
    method: str,
    depth: int,
) -> None:
    settings = {**models.settings(method), "pipeline_depth": depth, "max_num_seqs": 1}
    with engine_on(models.target, DEVICE, **settings) as engine:
        without = engine.generate(prompts, SAMPLING)
    fill(models.target, files(tmp_path), prompts, **settings)
    with kv_engine(models.target, files(tmp_path), **settings) as engine:
        outcomes = engine.generate(prompts, SAMPLING)
        assert engine.statistics().external_loaded_tokens == sum(map(num_full, prompts))
    assert len(adopted) * BLOCK_SIZE == sum(map(num_full, prompts))
    assert tokens(outcomes) == tokens(without) == plain
    assert acceptance(outcomes) == acceptance(without)
    if method == "draft_model":  # the target itself: whatever it lacked would cost a draft
        assert all(proposed == accepted for proposed, accepted in acceptance(outcomes))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("none", "draft_model"),
        ("none", "eagle3"),
        ("ngram", "ngram"),
        ("draft_model", "none"),
        ("draft_model", "eagle3"),
        ("other draft_model", "draft_model"),
        ("eagle3", "ngram"),
    ],
)
def test_an_absent_or_other_draft_loads_the_targets_alone(
    models: Models,
    prompts: list[list[int]],
    plain: list[list[int]],
    tmp_path: Path,
    adopted: list[int],
    theirs: str,
    ours: str,
) -> None:
    fill(models.target, files(tmp_path), prompts, **models.settings(theirs))
    with kv_engine(models.target, files(tmp_path), **models.settings(ours)) as engine:
        outcomes = engine.generate(prompts, SAMPLING)
        assert engine.statistics().external_loaded_tokens == sum(map(num_full, prompts))
        assert engine.statistics().num_failed_loads == 0
    assert tokens(outcomes) == plain
    assert not adopted
    if ours == "draft_model":
        drafted = sum(sum(proposed) for proposed, _ in acceptance(outcomes))
        assert drafted > 0, "it drafts from what it has seen"
