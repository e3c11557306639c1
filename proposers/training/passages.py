"""Pieces of prose and source code out of files: what prompts quote, or begin with."""

import gzip
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

PROSE_SUFFIXES = frozenset({"", ".txt", ".md", ".rst", ".pod", ".html", ".htm", ".dict", ".jsonl"})
CODE_SUFFIXES = frozenset(
    {".py", ".js", ".ts", ".c", ".h", ".cpp", ".hpp", ".rs", ".go", ".java", ".rb", ".pl", ".pm", ".sh", ".lua", ".sql"}
)
_PACKED = (".gz", ".dz")
_MOST_BYTES = 4 << 20
_WORDS = (30, 90)
_LINES = (5, 22)
_LONGEST_LINE = 110
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
_LEAST_LETTERS = 0.75
_LEGAL = re.compile(r"copyright|license|warranty|©|all rights reserved", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a file. Attributes: file_digest: of the file's place, so that a whole file goes into one split."""

    kind: Literal["prose", "code"]
    text: str
    file_digest: int


def read_passages(sources: Iterable[Path], per_file: int) -> list[Passage]:
    """Pieces of all files, each text once, in the order of paths. Args: per_file: most of one file, spread over it."""
    found: dict[str, Passage] = {}
    for root in sources:
        for path in _files(root):
            name = path.name
            for packed in _PACKED:
                name = name.removesuffix(packed)
            suffix = Path(name).suffix.lower()
            is_code = suffix in CODE_SUFFIXES
            if not is_code and suffix not in PROSE_SUFFIXES:
                continue
            text = _read(path, suffix)
            pieces = list(code_pieces(text) if is_code else prose_pieces(text))
            digest = int.from_bytes(hashlib.sha256(str(path.relative_to(root)).encode()).digest()[:8], "big")
            for piece in pieces[:: max(1, len(pieces) // per_file)][:per_file]:
                found.setdefault(piece, Passage("code" if is_code else "prose", piece, digest))
    return list(found.values())


def _files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith("."))
        yield from (Path(folder) / name for name in sorted(files) if not name.startswith("."))


def _read(path: Path, suffix: str) -> str:
    """The text of a file; nothing if it has none that can be read."""
    try:
        with gzip.open(path) if path.suffix in _PACKED else path.open("rb") as file:
            text = file.read(_MOST_BYTES).decode()
        if suffix == ".jsonl":
            return "\n\n".join(str(json.loads(line).get("text", "")) for line in text.splitlines())
    except (OSError, EOFError, ValueError, AttributeError):
        return ""
    return _text_of_html(text) if suffix in (".html", ".htm") else text


class _Text(HTMLParser):
    """Keeps what a reader sees, a paragraph each."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in ("script", "style", "pre", "nav", "head"):
            self._hidden += 1
        elif tag in ("p", "div", "li", "td", "h1", "h2", "h3", "h4", "dt", "dd", "br"):
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style", "pre", "nav", "head"):
            self._hidden = max(0, self._hidden - 1)

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)


def _text_of_html(text: str) -> str:
    parser = _Text()
    parser.feed(text)
    return "".join(parser.parts)


def prose_pieces(text: str) -> Iterator[str]:
    """Some sentences of a paragraph each, of 30 to 90 words that are words."""
    least, most = _WORDS
    for paragraph in re.split(r"\n\s*\n|\n%\n", text):
        sentences: list[str] = []
        count = 0
        for sentence in _SENTENCE.split(" ".join(paragraph.split())):
            length = len(sentence.split())
            if count + length > most:
                break
            sentences.append(sentence)
            count += length
        piece = " ".join(sentences)
        if count >= least and piece[-1] in ".!?" and _is_prose(piece):
            yield piece


def _is_prose(text: str) -> bool:
    letters = sum(character.isascii() and (character.isalpha() or character == " ") for character in text)
    return letters >= _LEAST_LETTERS * len(text) and text[0].isupper() and _LEGAL.search(text) is None


def code_pieces(text: str) -> Iterator[str]:
    """Lines of code each, from one at the left margin on, 5 to 22 of them."""
    least, most = _LINES
    lines = text.expandtabs(4).splitlines()
    start = 0
    while start < len(lines):
        if not lines[start] or lines[start][0] in " #/*}" or not lines[start].isascii():
            start += 1
            continue
        end = start + 1
        while end < min(len(lines), start + most) and (not lines[end] or lines[end][0] in " })"):
            end += 1
        piece = "\n".join(lines[start:end]).rstrip()
        is_short = all(len(line) <= _LONGEST_LINE for line in lines[start:end])
        if piece.count("\n") + 1 >= least and is_short and piece.isascii() and _LEGAL.search(piece) is None:
            yield piece
        start = end
