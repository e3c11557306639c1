"""Heads that come with Outrider, each for one model whose weights it was trained on."""

from collections.abc import Callable
from pathlib import Path

from server.errors import ConfigError

FOLDER = Path(__file__).with_name("heads")


def shipped_head(method: str, target_digest: Callable[[], str], folder: Path = FOLDER) -> Path:
    """The head of a kind for the model with these weights, in `folder`/METHOD/DIGEST.

    Args: target_digest: see TargetOutline; not called where there are no heads of the kind.
    Raises: ConfigError if there is none.
    """
    if (folder / method).is_dir() and ((head := folder / method / target_digest()) / "config.json").is_file():
        return head
    raise ConfigError(
        f"model: there is no {method} head for this model here; name a folder or a hub id that has one, or choose a "
        "method without weights, such as ngram"
    )
