"""Reads the files of draft heads as they are published: a configuration, and tensors by name."""

import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from server.errors import ModelError
from server.model.hub import fetch_from_hub
from server.model.weights import INDEX_FILE, SINGLE_FILE, read_weight_files

_PICKLES = ("pytorch_model*.bin", "medusa_lm_head.pt")
"""What heads were first published as. Only tensors are read from them; anything else is refused."""
_MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A head's files. Attributes: config: config.json. tensors: on the CPU, as they were saved."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """Read a head. Args: model: a folder, or a hub id of which what is missing is fetched. revision: of a hub id.

    Raises: ModelError naming cause and remedy.
    """
    folder = _find(model, revision)
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json, so it is no draft head") from None
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'} is broken ({error}); fetch the head again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{folder / 'config.json'} is no JSON object; fetch the head again")
    tensors: dict[str, Tensor] = {}
    for path in _weight_paths(folder):
        tensors |= _read_tensors(path)
    return Checkpoint(folder, config, tensors)


def check_names(folder: Path, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    """Compare the names and shapes that a configuration calls for with those that there are.

    Raises: ModelError.
    """
    if missing := sorted(expected.keys() - tensors.keys()):
        raise ModelError(f"{folder} lacks weights that its config.json calls for: {_named(missing)}")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise ModelError(f"{folder} has weights that its config.json does not call for: {_named(unknown)}")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ModelError(
                f"{folder}: {name} has the shape {list(tensors[name].shape)}, and config.json calls for {list(shape)}"
            )


def check_size(folder: Path, what: str, found: object, target: object) -> None:
    """Refuse a head whose sizes are not its target's. Raises: ModelError that names both."""
    if found != target:
        raise ModelError(f"{folder} was made for another model: its {what} is {found}, and the target's is {target}")


def _find(model: str, revision: str | None) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ModelError(f"revision {revision} is for hub ids, and {model} is a folder: leave it out")
        return path
    if path.is_absolute() or model.startswith(("~", ".")) or "/" not in model:
        raise ModelError(f"there is no folder {model}; a draft head is a folder or a hub id of the form owner/name")
    folder = fetch_from_hub(model, revision)
    return folder if any(folder.glob("*.safetensors")) else fetch_from_hub(model, revision, also=_PICKLES)


def _weight_paths(folder: Path) -> Iterable[Path]:
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
        return read_weight_files(folder).paths
    if paths := sorted(folder.glob("*.safetensors")):
        return paths
    if paths := sorted(path for pattern in _PICKLES for path in folder.glob(pattern)):
        return paths
    raise ModelError(f"{folder} has neither safetensors files nor {' or '.join(_PICKLES)}, so it is no draft head")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ModelError(f"{path} is broken ({error}); fetch the head again") from error
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(f"{path} is no pickle of tensors alone, and nothing else is read from pickles") from error
    except (EOFError, RuntimeError, ValueError, KeyError) as error:
        raise ModelError(f"{path} is broken ({str(error) or type(error).__name__}); fetch the head again") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ModelError(f"{path} holds more than tensors by name: it is no draft head")
    return tensors


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
