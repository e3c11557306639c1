"""Prompts as they are kept: JSON lines, or one JSON list, gzipped or not."""

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from server.errors import ConfigError

Kind = Literal["chat", "prose", "code"]
Split = Literal["train", "heldout", "handwritten"]
KINDS: Sequence[Kind] = ("chat", "prose", "code")


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One prompt.

    Attributes:
        kind: chat prompts go through the target's chat template, the others are continued as they are.
        task: what it was made from, such as a template's name.
        turns: user, assistant, user, ... for chat; one text for the others.
    """

    kind: Kind
    task: str
    split: Split
    turns: tuple[str, ...]

    @property
    def text(self) -> str:
        """All turns."""
        return "\n".join(self.turns)


def write_prompts(path: Path, prompts: Iterable[PromptRecord]) -> None:
    """One a line; gzipped, the same prompts give the same bytes, if `path` ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts).encode()
    path.write_bytes(gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)


def read_prompts(path: Path) -> list[PromptRecord]:
    """Prompts of a file; its split is "handwritten" where an entry names none. Raises: ConfigError."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
        entries = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
        return [_record(entry) for entry in entries]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no prompts: {error}") from error


def _record(entry: dict[str, Any]) -> PromptRecord:
    if entry["kind"] not in KINDS:
        raise ValueError(f"the kind {entry['kind']!r} is none of {', '.join(KINDS)}")
    return PromptRecord(entry["kind"], entry["task"], entry.get("split", "handwritten"), tuple(entry["turns"]))


def prompt_ids(prompt: PromptRecord, tokenizer: Any) -> list[int]:
    """The tokens that the target continues."""
    if prompt.kind != "chat":
        ids: list[int] = tokenizer.encode(prompt.turns[0])
        return ids
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(prompt.turns)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    chat: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return chat
