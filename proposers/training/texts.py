"""Generated texts: what the target wrote behind prompts, kept in shards that are whole or not there."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from server.errors import ConfigError

_PATTERN = "texts-*.npz"


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what the target made of it.

    Attributes:
        token_ids: [n] int32, the prompt's in front. num_prompt: how many they are.
        kind: chat, prose or code. split: train, heldout or handwritten.
        temperature: it was drawn at, as the target's whole distribution was; 0 is greedy.
    """

    token_ids: npt.NDArray[np.int32]
    num_prompt: int
    kind: str
    split: str
    temperature: float

    @property
    def output_ids(self) -> npt.NDArray[np.int32]:
        """What was generated."""
        return self.token_ids[self.num_prompt :]


def shard_path(folder: Path, split: str, index: int) -> Path:
    """Where a shard is kept."""
    return folder / f"texts-{split}-{index:05d}.npz"


def write_shard(path: Path, texts: Sequence[Text]) -> None:
    """Write texts; the file appears when it is whole."""
    labels = [(text.kind, text.split, text.temperature) for text in texts]
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez_compressed(
            file,
            token_ids=np.concatenate([text.token_ids for text in texts]).astype(np.int32),
            lengths=np.array([len(text.token_ids) for text in texts], dtype=np.int32),
            num_prompt=np.array([text.num_prompt for text in texts], dtype=np.int32),
            labels=np.frombuffer(json.dumps(labels).encode(), dtype=np.uint8),
        )
    partial.rename(path)


def read_shard(path: Path) -> Iterator[Text]:
    """The texts of a shard, in order. Raises: ConfigError if it is none."""
    try:
        with np.load(path) as arrays:
            token_ids, lengths, num_prompt = arrays["token_ids"], arrays["lengths"], arrays["num_prompt"]
            labels = json.loads(arrays["labels"].tobytes())
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} holds no generated texts ({error}); delete it and generate again") from error
    pieces = np.split(token_ids, np.cumsum(lengths)[:-1])
    for piece, prompt, (kind, split, temperature) in zip(pieces, num_prompt.tolist(), labels, strict=True):
        yield Text(piece, prompt, kind, split, temperature)


def read_texts(folder: Path, splits: Sequence[str]) -> list[Text]:
    """All texts of some splits. Raises: ConfigError if there are none."""
    texts = [text for path in sorted(folder.glob(_PATTERN)) for text in read_shard(path) if text.split in splits]
    if not texts:
        raise ConfigError(f"{folder} has no generated texts of {' or '.join(splits)}; run the stage generate first")
    return texts
