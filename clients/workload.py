"""What a benchmark sends, and when."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class WorkloadError(ValueError):
    """The prompts cannot be made or read as asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt, either as text or as token ids, and the most tokens to generate for it."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    max_tokens: int


def random_prompts(*, input_len: int, output_len: int, prefix_len: int, vocab_size: int, seed: int) -> Iterator[Prompt]:
    """Endless prompts of `prefix_len` shared and `input_len` own token ids, the same for the same seed."""
    source = random.Random(seed)
    prefix = tuple(source.randrange(vocab_size) for _ in range(prefix_len))
    while True:
        own = tuple(source.randrange(vocab_size) for _ in range(input_len))
        yield Prompt(token_ids=prefix + own, max_tokens=output_len)


def read_prompts(path: Path, *, output_len: int) -> Iterator[Prompt]:
    """The prompts of a file, over and over, read as they are needed.

    A `.jsonl` file has an object per line: "prompt" or "prompt_token_ids", and "max_tokens"
    where it is not `output_len`. Any other file is one prompt per line. Blank lines are skipped.
    Raises: WorkloadError naming the line; when iterated.
    """
    read_line = _read_object if path.suffix == ".jsonl" else _read_text
    while True:
        is_empty = True
        try:
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        is_empty = False
                        yield read_line(line, f"{path}:{number}", output_len)
        except (OSError, UnicodeDecodeError) as error:
            raise WorkloadError(f"cannot read {path}: {error}") from error
        if is_empty:
            raise WorkloadError(f"{path} has no prompts")


def _read_text(line: str, _where: str, output_len: int) -> Prompt:
    return Prompt(text=line.rstrip("\r\n"), max_tokens=output_len)


def _read_object(line: str, where: str, output_len: int) -> Prompt:
    try:
        item: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{where}: not JSON: {error}") from error
    if not isinstance(item, dict) or ("prompt" in item) == ("prompt_token_ids" in item):
        raise WorkloadError(f'{where}: must be an object with either "prompt" or "prompt_token_ids"')
    text, token_ids, max_tokens = item.get("prompt"), item.get("prompt_token_ids"), item.get("max_tokens", output_len)
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise WorkloadError(f'{where}: "max_tokens" must be an integer of at least 1')
    if token_ids is None:
        if not isinstance(text, str):
            raise WorkloadError(f'{where}: "prompt" must be text')
        return Prompt(text=text, max_tokens=max_tokens)
    if not isinstance(token_ids, list) or not all(isinstance(token_id, int) for token_id in token_ids):
        raise WorkloadError(f'{where}: "prompt_token_ids" must be a list of integers')
    return Prompt(token_ids=tuple(token_ids), max_tokens=max_tokens)


def poisson_arrivals(rate: float, *, seed: int) -> Iterator[float]:
    """Endless seconds since the start, `rate` per second on average at independent times; all 0 if infinite."""
    source = random.Random(seed)
    now_s = 0.0
    while True:
        yield now_s
        now_s += source.expovariate(rate)
