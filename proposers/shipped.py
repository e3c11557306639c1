"""Heads that come with Outrider, each for one model whose weights it was trained on."""

from pathlib import Path

from server.errors import ConfigError

FOLDER = Path(__file__).with_name("heads")


def shipped_head(method: str, digest: str, folder: Path = FOLDER) -> Path:
    """The head of a kind for the model with these weights, in `folder`/METHOD/DIGEST.

    Raises: ConfigError if there is none.
    """
    head = folder / method / digest
    if not (head / "config.json").is_file():
        raise ConfigError(
            f"speculative_config.model: there is no {method} head for this model here; name a folder or a hub id that "
            "has one, or choose a method without weights, such as ngram"
        )
    return head
