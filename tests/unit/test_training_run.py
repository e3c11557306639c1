"""Training itself: what is learnt, what is resumed, what is written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from proposers.base import TargetModel
from proposers.checkpoint import read_checkpoint
from proposers.eagle_checkpoint import eagle_head
from proposers.medusa_heads import medusa_heads
from proposers.training.acceptance import Drafter
from proposers.training.beginning import new_trainee
from proposers.training.curves import draw_curves
from proposers.training.eagle_trainee import EagleTrainee
from proposers.training.export import export_head
from proposers.training.feature_source import FeatureSource, KeptFeatures, RecomputedFeatures
from proposers.training.medusa_trainee import load_medusa
from proposers.training.objectives import EagleObjective, MedusaObjective, Objective
from proposers.training.packing import PackedRows, pack
from proposers.training.run_folder import RunFolder
from proposers.training.schedule import TrainSettings, batches, learning_rate, num_steps
from proposers.training.target import TargetFeatures, Wanted
from proposers.training.teacher_forced import HeldOut, measure
from proposers.training.trainer import Pace, Trainer
from proposers.training.vocabulary import frequent_tokens
from server.errors import ConfigError, OutriderError
from tests.fakes.training import TAPS, VOCAB, greedy_texts, tiny_target

LENGTH = 24
SMALL = {"vocab_size": 400, "taps": TAPS, "row_length": 2 * LENGTH, "batch_rows": 4, "passes": 3, "learning_rate": 2e-3}


def settings(**changes: Any) -> TrainSettings:
    return TrainSettings.model_validate(SMALL | {"epochs": 4} | changes)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, device_name: str) -> TargetModel:
    return tiny_target(tmp_path_factory.mktemp("target"), device_name)


class Run:
    """A run over a few texts of the tiny target. Args: num_kept: rows whose features are kept; all if None."""

    def __init__(self, target: TargetModel, folder: Path, given: TrainSettings, *, num_kept: int | None = None) -> None:
        self.target, self.settings, self.folder = target, given, RunFolder(folder)
        self.folder.begin(given, target.digest)
        self.texts = greedy_texts(target, 24, LENGTH)
        device = target.model.device
        to_target = frequent_tokens(self.texts, VOCAB, given.vocab_size).to(device)
        rows = pack(self.texts, given.row_length)[0].to(device)
        self.trainee, wanted = new_trainee(target, given, to_target)
        self.features = TargetFeatures(target, wanted)
        source: FeatureSource = (
            RecomputedFeatures(rows, self.features) if num_kept == 0 else KeptFeatures(rows, self.features, 5, num_kept)
        )
        objective: Objective
        if isinstance(self.trainee, EagleTrainee):
            objective = EagleObjective(
                self.trainee,
                target,
                num_passes=given.passes,
                temperature=0.8,
                overlap_weight=given.overlap_weight,
            )
        else:
            objective = MedusaObjective(self.trainee, target, temperature=0.8)
        self.trainer = Trainer(objective, source, rows.num_rows, given, self.folder, to_target)

    def mean_length(self, k: int = 3) -> float:
        """Of greedy drafts in the texts that it is trained on."""
        drafter = Drafter(self.trainee, VOCAB, 0.8)
        held_out = HeldOut(self.texts, (k,), row_length=self.settings.row_length)
        measures = measure(held_out, drafter, self.features, self.target.model.device, "it")
        return measures.mean_lengths()["temperature 0, greedy drafts"]

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.trainee.state_dict().items()}


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_output": True}, {"norm_output": True}, {"overlap_weight": 0.5}, {"kind": "medusa"}],
    ids=str,
)
def test_the_loss_falls_and_more_drafts_are_accepted(
    tmp_path: Path, target: TargetModel, changes: dict[str, Any]
) -> None:
    run = Run(target, tmp_path, settings(epochs=15, **changes))
    before = run.mean_length()
    assert run.trainer.run(Pace(report_every=5, save_every=1000))
    reports = run.folder.reports()
    first, last = reports[0], reports[-1]
    assert all(later < earlier for later, earlier in zip(last["loss"], first["loss"], strict=True))
    assert last["overlap"][0] > first["overlap"][0]
    assert run.mean_length() > before


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_run_that_is_gone_on_with_ends_as_one_without_a_break(tmp_path: Path, target: TargetModel, kind: str) -> None:
    whole = Run(target, tmp_path / "whole", settings(kind=kind))
    assert whole.trainer.run(Pace(save_every=1000))
    broken = Run(target, tmp_path / "broken", settings(kind=kind))
    assert not broken.trainer.run(Pace(report_every=1, save_every=1000, stop_after_s=0))
    steps = [len(broken.folder.reports())]
    resumed = Run(target, tmp_path / "broken", settings(kind=kind))
    assert resumed.trainer.run(Pace(report_every=1, save_every=1000))
    assert steps == [1]
    assert [entry["step"] for entry in resumed.folder.reports()] == list(range(num_steps(whole.settings, 12)))
    for name, expected in whole.weights().items():
        torch.testing.assert_close(resumed.weights()[name], expected, rtol=0, atol=0, msg=name)
    after = Run(target, tmp_path / "broken", settings(kind=kind))
    assert after.trainer.run(Pace()), "there is nothing left to do"
    for name, expected in whole.weights().items():
        torch.testing.assert_close(after.weights()[name], expected, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("num_kept", [0, 5])
def test_features_are_the_same_kept_or_computed_again(tmp_path: Path, target: TargetModel, num_kept: int) -> None:
    kept = Run(target, tmp_path / "kept", settings(epochs=1))
    computed = Run(target, tmp_path / "computed", settings(epochs=1), num_kept=num_kept)
    for run in (kept, computed):
        run.trainer.run(Pace())
    for name, expected in kept.weights().items():
        torch.testing.assert_close(computed.weights()[name], expected, rtol=1e-4, atol=1e-5, msg=name)


def test_another_run_s_folder_is_refused(tmp_path: Path, target: TargetModel) -> None:
    Run(target, tmp_path, settings())
    with pytest.raises(ConfigError, match=r"other settings \(learning_rate, passes\)"):
        Run(target, tmp_path, settings(passes=2, learning_rate=1e-3))


def test_other_texts_are_refused(tmp_path: Path, target: TargetModel) -> None:
    run = Run(target, tmp_path, settings())
    run.trainer.run(Pace(stop_after_s=0))
    run.trainer._to_target = run.trainer._to_target.flip(0)
    with pytest.raises(ConfigError, match="trained on other texts"):
        run.trainer.run(Pace())


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, target: TargetModel) -> None:
    run = Run(target, tmp_path, settings())
    with torch.no_grad():
        next(iter(run.trainee.parameters())).fill_(torch.nan)
    with pytest.raises(OutriderError, match=r"in step 0: .*lower --learning-rate"):
        run.trainer.run(Pace())


def test_the_rate_rises_then_falls_to_almost_nothing() -> None:
    given = settings(learning_rate=1.0, warm_up=0.1)
    rates = [learning_rate(given, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates == [*sorted(rates[:10]), *sorted(rates[10:], reverse=True)]
    assert rates[-1] == pytest.approx(0.01, abs=1e-3)


def test_every_row_is_seen_once_an_epoch_in_another_order_each_time() -> None:
    given = settings(epochs=2)
    seen = [rows.tolist() for _, rows in batches(given, 12, 0, num_steps(given, 12))]
    first, second = [row for rows in seen[:3] for row in rows], [row for rows in seen[3:] for row in rows]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert [rows.tolist() for _, rows in batches(given, 12, 4, 6)] == seen[4:]


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_head_loads_as_any_published_one(tmp_path: Path, target: TargetModel, tied: bool) -> None:
    run = Run(target, tmp_path / "run", settings(tied_output=tied))
    nbytes = export_head(run.trainee, target, tmp_path / "head", 100)
    assert nbytes == sum(path.stat().st_size for path in (tmp_path / "head").iterdir())
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {torch.float16}
    assert ("lm_head.weight" in tensors) is not tied
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["target_digest"] == target.digest
    assert config["speculators_config"]["algorithm"] == "eagle3"
    head = eagle_head(read_checkpoint(str(tmp_path / "head")), target, "eagle3")
    assert (head.taps, head.vocab_size, head.norms.each_tap) == (TAPS, 100, True)
    assert head.to_target is not None
    assert head.to_target.tolist() == run.trainer._to_target[:100].tolist()
    with pytest.raises(ConfigError, match="trained for 400 tokens"):
        export_head(run.trainee, target, tmp_path / "head", 401)


def test_exported_medusa_heads_compute_what_was_trained(tmp_path: Path, target: TargetModel) -> None:
    run = Run(target, tmp_path / "run", settings(kind="medusa"))
    run.trainer.run(Pace())
    export_head(run.trainee, target, tmp_path / "head")
    checkpoint = read_checkpoint(str(tmp_path / "head"))
    trainee, served = load_medusa(checkpoint, target), medusa_heads(checkpoint, target, target.model.device)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(target.model.device)
    with torch.no_grad():
        expected = torch.stack([trainee.logits(state) for state in trainee.states(hidden)], dim=1)
    torch.testing.assert_close(served.logits(hidden, 4), expected, rtol=1e-4, atol=1e-4)
    assert served.to_target is not None
    assert served.to_target.tolist() == trainee.to_target.tolist()


def test_curves_are_a_picture(tmp_path: Path) -> None:
    reports = [
        {"what": "train", "step": step, "loss": [2.0 / (1 + step)] * 2, "overlap": [0.1 * step] * 2} for step in (0, 5)
    ]
    draw_curves([*reports, {"what": "heldout", "step": 5, "k": 4, "mean_length": {"greedy": 1.5}}], tmp_path / "a.png")
    draw_curves([], tmp_path / "b.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png"))


def test_features_of_a_model_with_a_window_need_short_rows(tmp_path: Path, device_name: str) -> None:
    from tests.fakes.tiny_target import target_model
    from tests.tiny_model import build_tiny_model

    target = target_model(build_tiny_model(tmp_path, sliding_window=16), device_name)
    target.model.set_attn_implementation("sdpa")
    rows: PackedRows = pack(greedy_texts(target, 1, 12), 32)[0].to(target.model.device)
    with pytest.raises(ConfigError, match="window of 16"):
        TargetFeatures(target, Wanted((0,), 0.8)).compute(rows)
