"""Texts that share a run of 13 words with others, so that nothing is measured on what was trained on."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from server.errors import ConfigError

NGRAM = 13
_WORD = re.compile(r"\w+|[^\w\s]")


def ngrams(text: str) -> Iterator[int]:
    """A hash of every 13-gram of words and marks, in small letters; equal only within a process."""
    words = _WORD.findall(text.lower())
    return (hash(tuple(words[start : start + NGRAM])) for start in range(len(words) - NGRAM + 1))


def ngrams_of(texts: Iterable[str]) -> set[int]:
    """Those of all texts."""
    return {ngram for text in texts for ngram in ngrams(text)}


def shares_ngram(texts: Iterable[str], known: set[int]) -> bool:
    """Whether one of some texts has any of them."""
    return any(not known.isdisjoint(ngrams(text)) for text in texts)


def strings_of_json(path: Path) -> Iterator[str]:
    """Every string value in a JSON file. Raises: ConfigError if it is none."""

    def strings(value: object) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | dict):
            for part in value.values() if isinstance(value, dict) else value:
                yield from strings(part)

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no JSON file: {error}") from error
    yield from strings(content)
