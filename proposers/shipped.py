"""Heads that come with Outrider, each for one model whose weights it was trained on."""

from collections.abc import Callable
from pathlib import Path

from server.errors import ConfigError

FOLDER = Path(__file__).with_name("heads")


def has_shipped_head(method: str, target_digest: Callable[[], str], folder: Path = FOLDER) -> bool:
    """Whether there is one; Args: as below."""
    return (folder / method).is_dir() and (folder / method / target_digest() / "config.json").is_file()


def shipped_head(method: str, target_digest: Callable[[], str], folder: Path = FOLDER) -> Path:
    """The head of a kind for the model with these weights, in `folder`/METHOD/DIGEST.

    Args: target_digest: see TargetOutline; not called where there are no heads of the kind.
    Raises: ConfigError if there is none.
    """
    if has_shipped_head(method, target_digest, folder):
        return folder / method / target_digest()
    raise ConfigError(
        f"model: there is no {method} head for this model here; name a folder or a hub id that has one, or choose a "
        "method without weights, such as ngram"
    )
