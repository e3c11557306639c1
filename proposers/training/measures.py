"""Acceptance by kind of text, temperature and number of drafts, as lines of one table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

ALL_KINDS = "all"


@dataclass(slots=True)
class Tally:
    """Steps of a server with k drafts each, and what they kept.

    Attributes:
        num_texts: that were looked at. num_tokens: of all steps, the one behind the drafts included.
        kept: by draft, the steps that kept it and all before it.
    """

    k: int
    num_texts: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    kept: list[int] = field(default_factory=list)

    def add(self, num_kept: int, num_steps: int = 1) -> None:
        """Count steps that kept so many drafts each."""
        self.kept = self.kept or [0] * self.k
        self.num_steps += num_steps
        self.num_tokens += (1 + num_kept) * num_steps
        for index in range(num_kept):
            self.kept[index] += num_steps

    @property
    def mean_length(self) -> float:
        """Tokens of a step; 0 without steps."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance(self) -> list[float]:
        """By draft, the share of steps that kept it and all before it."""
        return [count / self.num_steps for count in self.kept] if self.num_steps else []


@dataclass(frozen=True, slots=True)
class Line:
    """What a tally is of.

    Attributes:
        how: teacher-forced or end to end. method: eagle3, medusa, ngram, ... split: of the prompts.
        kind: chat, prose, code or all. drafts: greedy or drawn. is_low_repetition: whether texts that repeat
            themselves are left out.
    """

    how: str
    method: str
    split: str
    kind: str
    temperature: float
    drafts: str
    is_low_repetition: bool
    k: int


class Measures:
    """Tallies by line, made as they are asked for."""

    def __init__(self) -> None:
        self._tallies: dict[Line, Tally] = {}

    def of(self, line: Line) -> Tally:
        """The tally of a line."""
        return self._tallies.setdefault(line, Tally(line.k))

    def mean_lengths(self) -> dict[str, float]:
        """Of texts of every kind, those that repeat themselves included, by how they and their drafts were drawn."""
        return {
            f"temperature {line.temperature:g}, {line.drafts} drafts": tally.mean_length
            for line, tally in self._tallies.items()
            if line.kind == ALL_KINDS and not line.is_low_repetition
        }

    def entries(self) -> list[dict[str, Any]]:
        """Every line with its numbers, as plain values."""
        names = ("how", "method", "split", "kind", "temperature", "drafts", "is_low_repetition", "k")
        return [
            {name: getattr(line, name) for name in names}
            | {
                "num_texts": tally.num_texts,
                "num_steps": tally.num_steps,
                "mean_length": round(tally.mean_length, 4),
                "acceptance": [round(share, 4) for share in tally.acceptance],
            }
            for line, tally in self._tallies.items()
        ]


def table(entries: Iterable[dict[str, Any]]) -> str:
    """Lines for a terminal: one for each series of k, with its mean lengths and the acceptance of the largest k."""
    series: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        key = tuple(value for name, value in entry.items() if name in _COLUMNS)
        series.setdefault(key, []).append(entry)
    ks = sorted({entry["k"] for group in series.values() for entry in group})
    heading = [*_COLUMNS.values(), "texts", *(f"k={k}" for k in ks), "kept by draft"]
    lines = [heading, *(_row(group, ks) for group in series.values())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


_COLUMNS = {
    "how": "how",
    "method": "method",
    "split": "prompts",
    "kind": "kind",
    "temperature": "temp",
    "drafts": "drafts",
    "is_low_repetition": "texts that repeat",
}


def _row(group: Sequence[dict[str, Any]], ks: Sequence[int]) -> list[str]:
    first, last = group[0], max(group, key=lambda entry: int(entry["k"]))
    by_k = {entry["k"]: entry["mean_length"] for entry in group}
    shown = {**first, "is_low_repetition": "left out" if first["is_low_repetition"] else "with"}
    return [
        *(str(shown[name]) for name in _COLUMNS),
        str(first["num_texts"]),
        *(f"{by_k[k]:.3f}" if k in by_k else "" for k in ks),
        " ".join(f"{share:.3f}" for share in last["acceptance"]),
    ]
