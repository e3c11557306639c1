"""Runs that begin with a head that was trained before."""

from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.base import TargetModel
from proposers.training.beginning import head_to_train_on, new_trainee
from proposers.training.eagle_trainee import EagleTrainee
from proposers.training.export import export_head
from proposers.training.schedule import TrainSettings
from server.errors import ConfigError
from tests.fakes.training import TAPS, VOCAB, tiny_target

KNOWN = torch.arange(3, VOCAB, 5)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, device_name: str) -> TargetModel:
    return tiny_target(tmp_path_factory.mktemp("target"), device_name)


def exported(target: TargetModel, folder: Path, **changes: Any) -> EagleTrainee:
    """A head as it was before it was written, in half precision."""
    trainee, _ = new_trainee(target, TrainSettings(taps=TAPS, seed=3, **changes), KNOWN.to(target.model.device))
    assert isinstance(trainee, EagleTrainee)
    export_head(trainee, target, folder)
    return trainee


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_a_run_begins_with_the_head_and_its_shape(
    tmp_path: Path, target: TargetModel, tied: bool, normed: bool
) -> None:
    before = exported(target, tmp_path, tied_output=tied, norm_output=normed)
    begun = head_to_train_on(target, TrainSettings(init=tmp_path, epochs=2))
    assert begun is not None
    head, settings = begun
    assert head.to_target.tolist() == KNOWN.tolist()
    assert settings.taps == TAPS
    assert (settings.tied_output, settings.norm_output, settings.epochs) == (tied, normed, 2)
    assert settings.vocab_size == len(KNOWN)
    trainee, wanted = new_trainee(target, settings, head.to_target)
    trainee.load_state_dict(head.state_dict())
    assert wanted.taps == TAPS
    for name, weights in before.state_dict().items():
        torch.testing.assert_close(trainee.state_dict()[name], weights, rtol=1e-3, atol=1e-3, msg=name)


def test_without_a_head_there_is_none(target: TargetModel) -> None:
    assert head_to_train_on(target, TrainSettings()) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "medusa"}, "only heads of the kind eagle3"),
        ({"taps": TAPS, "vocab_size": 9}, "--taps, --vocab-size: not together with --init"),
    ],
)
def test_settings_that_contradict_the_head_are_refused(
    tmp_path: Path, target: TargetModel, changes: dict[str, Any], words: str
) -> None:
    exported(target, tmp_path)
    with pytest.raises(ConfigError, match=words):
        head_to_train_on(target, TrainSettings(init=tmp_path, **changes))


def test_heads_of_another_make_are_refused(tmp_path: Path, target: TargetModel) -> None:
    exported(target, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"norm_before_residual": false', '"norm_before_residual": true'))
    with pytest.raises(ConfigError, match="of another make"):
        head_to_train_on(target, TrainSettings(init=tmp_path))
