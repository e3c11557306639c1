"""Frames of prompts, and what fills them: word lists, numbers, pieces of files."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from random import Random
from typing import Any

from proposers.training.passages import Passage
from proposers.training.prompt_file import Kind

_SLOT = re.compile(r"\{([a-z]+)(?:_\d)?\}")
_NUMBERS = {"small": (2, 12), "medium": (13, 99), "large": (100, 999), "age": (5, 90)}
_FEW = ("two", "three", "four", "five", "six", "seven", "eight", "ten")
_TENS = ("ten", "15", "20", "30", "50")
_TYPO_EVERY = 9


@dataclass(frozen=True, slots=True)
class Templates:
    """Attributes: lists: what slots of that name are filled with. frames, weights, kinds: of each task, by name."""

    lists: Mapping[str, Sequence[str]]
    frames: Mapping[str, Sequence[Sequence[str]]]
    weights: Mapping[str, int]
    kinds: Mapping[str, Kind]


@cache
def templates() -> Templates:
    """Those that come with Outrider."""
    content = json.loads(files("proposers.training").joinpath("templates.json").read_text(encoding="utf-8"))
    tasks: dict[str, Any] = content["tasks"]
    return Templates(
        content["lists"],
        {name: task["frames"] for name, task in tasks.items()},
        {name: task["weight"] for name, task in tasks.items()},
        {name: task.get("kind", "chat") for name, task in tasks.items()},
    )


@dataclass(frozen=True, slots=True)
class Material:
    """Pieces that slots are filled with. Attributes: words: rare enough to be asked about."""

    prose: Sequence[Passage]
    code: Sequence[Passage]
    words: Sequence[str]


def fill(frame: Sequence[str], material: Material, random: Random) -> tuple[tuple[str, ...], list[Passage]]:
    """The turns of a prompt, and the pieces that are quoted in them.

    A slot that has the same name in two places has one value; {topic} and {topic_2} are two of one kind.
    """
    values: dict[str, str] = {}
    quoted: list[Passage] = []

    def value(match: re.Match[str]) -> str:
        if match[0] not in values:
            values[match[0]] = _value(match[1], material, random, quoted)
        return values[match[0]]

    return tuple(_SLOT.sub(value, turn) for turn in frame), quoted


def casual(turn: str) -> str:
    """As people type who are in a hurry: in small letters, without the mark at the end; code stays as it is."""
    return turn if "`" in turn else turn.lower().rstrip(".?!")


def _value(slot: str, material: Material, random: Random, quoted: list[Passage]) -> str:
    if slot in _NUMBERS:
        return str(random.randint(*_NUMBERS[slot]))
    if slot in ("passage", "sentence", "typos", "code"):
        passage = random.choice(material.code if slot == "code" else material.prose)
        quoted.append(passage)
        if slot in ("passage", "code"):
            return passage.text
        sentence = random.choice(re.split(r"(?<=[.!?]) ", passage.text))
        return sentence if slot == "sentence" else _with_typos(sentence, random)
    if slot == "few":
        return random.choice(_FEW)
    if slot == "tens":
        return random.choice(_TENS)
    if slot == "letter":
        return random.choice("abcdefghilmnoprstw")
    return random.choice(material.words if slot == "word" else templates().lists[slot])


def _with_typos(text: str, random: Random) -> str:
    """Some letters swapped or left out."""
    letters = list(text)
    for index in range(1, len(letters) - 1):
        if letters[index].isalpha() and random.randrange(_TYPO_EVERY) == 0:
            if random.random() < 0.5:
                letters[index] = ""
            else:
                letters[index], letters[index + 1] = letters[index + 1], letters[index]
    return "".join(letters)
