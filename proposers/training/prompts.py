"""Makes prompts out of files and templates, split into those to train on and those to measure on."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from pydantic import BaseModel, ConfigDict, Field

from proposers.training.overlap import ngrams_of, shares_ngram, strings_of_json
from proposers.training.passages import Passage, read_passages
from proposers.training.prompt_file import PromptRecord, Split
from proposers.training.templates import Material, casual, fill, templates
from server.errors import ConfigError

logger = logging.getLogger(__name__)

_RARE, _COMMON = 3, 200
_SHORTEST_WORD = 5
_CASUAL_SHARE = 0.08
_MOST_TRIES = 20
"""For each prompt that is still wanted: short lists run out of prompts that are new."""


class PromptSettings(BaseModel):
    """Settings of the stage prompts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sources: tuple[Path, ...] = Field(min_length=1, description="files and folders with prose and source code")
    output: Path = Field(description="file to write, JSON lines; gzipped if it ends in .gz")
    num_prompts: int = Field(default=50_000, ge=1, description="prompts of both splits together")
    prose_share: float = Field(default=0.15, ge=0, le=1, description="share that is prose to be continued")
    code_share: float = Field(default=0.15, ge=0, le=1, description="share that is code to be continued")
    heldout_share: float = Field(default=0.02, gt=0, lt=1, description="share that is not to be trained on")
    per_file: int = Field(default=40, ge=1, description="most pieces that are taken of one file")
    exclude: tuple[Path, ...] = Field(
        default=(), description="JSON files; no training prompt shares a 13-gram with a string in them"
    )
    seed: int = Field(default=0, ge=0, description="of what is drawn")


def make_prompts(settings: PromptSettings) -> list[PromptRecord]:
    """Prompts in random order, the same for the same files and settings.

    A prompt that quotes a file goes where the file goes, by the file's hash; the others go by their own. Training
    prompts that share a 13-gram with a held-out one, or with an excluded text, are dropped.
    Raises: ConfigError if the files have too little in them.
    """
    passages = read_passages(settings.sources, settings.per_file)
    material = _material(passages)
    logger.info("%d pieces of prose, %d of code, %d words", *map(len, (material.prose, material.code, material.words)))
    if not material.prose or not material.code or not material.words:
        raise ConfigError("the sources need both prose and source code: name more files or folders")
    random = Random(settings.seed)
    found: dict[str, PromptRecord] = {}
    for prompt in _draw(settings, material, random):
        found.setdefault(prompt.text, prompt)
        if len(found) == settings.num_prompts:
            break
    prompts = list(found.values())
    held_out = [turn for prompt in prompts if prompt.split == "heldout" for turn in prompt.turns]
    excluded = [text for path in settings.exclude for text in strings_of_json(path)]
    known = ngrams_of([*held_out, *excluded])
    kept = [prompt for prompt in prompts if prompt.split == "heldout" or not shares_ngram(prompt.turns, known)]
    splits = Counter(prompt.split for prompt in kept)
    logger.info(
        "%d prompts to train on, %d held out; %d dropped that share a 13-gram with what is measured on",
        splits["train"],
        splits["heldout"],
        len(prompts) - len(kept),
    )
    return kept


def _material(passages: Sequence[Passage]) -> Material:
    prose = [passage for passage in passages if passage.kind == "prose"]
    words = (word for passage in prose for word in passage.text.split())
    counts = Counter(word for word in words if word.isalpha() and word.isascii() and word.islower())
    rare = [word for word, count in counts.items() if _RARE <= count <= _COMMON and len(word) >= _SHORTEST_WORD]
    return Material(prose, [passage for passage in passages if passage.kind == "code"], sorted(rare))


def _draw(settings: PromptSettings, material: Material, random: Random) -> Iterator[PromptRecord]:
    known = templates()
    tasks = list(known.frames)
    weights = [known.weights[task] for task in tasks]
    for _ in range(settings.num_prompts * _MOST_TRIES):
        chance = random.random()
        if chance < settings.prose_share:
            passage = random.choice(material.prose)
            words = passage.text.split()
            text = " ".join(words[: random.randint(6, max(6, len(words) * 2 // 3))])
            yield PromptRecord("prose", "continue", _split(settings, text, [passage]), (text,))
        elif chance < settings.prose_share + settings.code_share:
            passage = random.choice(material.code)
            lines = passage.text.splitlines()
            text = "\n".join(lines[: random.randint(2, max(2, len(lines) * 2 // 3))]).rstrip() + "\n"
            yield PromptRecord("code", "continue", _split(settings, text, [passage]), (text,))
        else:
            (task,) = random.choices(tasks, weights)
            turns, quoted = fill(random.choice(known.frames[task]), material, random)
            kind = known.kinds[task]
            if kind == "chat" and not quoted and random.random() < _CASUAL_SHARE:
                turns = (casual(turns[0]), *turns[1:])
            yield PromptRecord(kind, task, _split(settings, "\n".join(turns), quoted), turns)


def _split(settings: PromptSettings, text: str, quoted: Sequence[Passage]) -> Split:
    digests = [passage.file_digest for passage in quoted] or [
        int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    ]
    is_held_out = any(digest < settings.heldout_share * 2**64 for digest in digests)
    return "heldout" if is_held_out else "train"
