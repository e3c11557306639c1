"""What a run leaves in its folder: settings, a checkpoint to go on from, and a line for every report."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proposers.training.schedule import TrainSettings
from server.errors import ConfigError

_SETTINGS, _CHECKPOINT, _REPORTS = "settings.json", "checkpoint.pt", "progress.jsonl"


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands. Attributes: step: the next one. total: all of them. to_target: its vocabulary, on the CPU."""

    step: int
    total: int
    to_target: Tensor


class RunFolder:
    """The files of one run; written by one process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, settings: TrainSettings, digest: str) -> None:
        """Note what is trained for which target. Raises: ConfigError if the folder is another run's."""
        self.folder.mkdir(parents=True, exist_ok=True)
        given = {**settings.model_dump(mode="json"), "target_digest": digest}
        path = self.folder / _SETTINGS
        if path.exists():
            known = json.loads(path.read_text())
            if changed := sorted(name for name in given if given[name] != known.get(name)):
                raise ConfigError(
                    f"{self.folder} is a run with other settings ({', '.join(changed)}): name another folder, or "
                    "delete it"
                )
        path.write_text(json.dumps(given, indent=1))

    def settings(self) -> tuple[TrainSettings, str]:
        """What was trained, and the target's digest. Raises: ConfigError if nothing was."""
        try:
            known = json.loads((self.folder / _SETTINGS).read_text())
        except FileNotFoundError:
            raise ConfigError(f"{self.folder} is no training run; run the stage train first") from None
        digest = known.pop("target_digest")
        return TrainSettings.model_validate(known), digest

    def save(self, state: RunState, trainee: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Write the checkpoint in place of the last one. Args: optimizer: None once the run is over."""
        content = {
            "step": state.step,
            "total": state.total,
            "to_target": state.to_target,
            "weights": trainee.state_dict(),
            "optimizer": None if optimizer is None else optimizer.state_dict(),
        }
        partial = self.folder / (_CHECKPOINT + ".partial")
        torch.save(content, partial)
        partial.rename(self.folder / _CHECKPOINT)

    def load(self, device: torch.device) -> tuple[RunState, Mapping[str, Tensor], Any] | None:
        """State, weights and the optimizer's state of the checkpoint; None if there is none yet."""
        path = self.folder / _CHECKPOINT
        if not path.exists():
            return None
        content = torch.load(path, map_location=device, weights_only=True)
        state = RunState(content["step"], content["total"], content["to_target"].cpu())
        return state, content["weights"], content["optimizer"]

    def report(self, entry: Mapping[str, Any]) -> None:
        """Add a line to the reports."""
        with (self.folder / _REPORTS).open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def reports(self) -> list[dict[str, Any]]:
        """All reports; where steps were done twice, those of the second time."""
        path = self.folder / _REPORTS
        if not path.exists():
            return []
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        latest = {(entry["step"], entry["what"]): entry for entry in entries}
        return sorted(latest.values(), key=lambda entry: int(entry["step"]))
