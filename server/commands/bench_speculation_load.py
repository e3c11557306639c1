"""What `outrider bench speculation` runs, and what it is to show."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

GOALS: Mapping[str, float] = {"auto_per_off": 0.98, "auto_per_best": 0.95}
"""What the policy auto is to reach: of no speculation, and of the best fixed number of drafts."""
WORKLOADS = ("repeat", "text", "random")


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The arguments, see their help.

    Attributes:
        drafts: fixed numbers of them.
        change_steps: steps to adapt in, and then as many that are measured; 0 for no change.
    """

    concurrency: tuple[int, ...]
    drafts: tuple[int, ...]
    workloads: tuple[str, ...]
    input_len: int
    output_len: int
    temperature: float
    repeat: int
    change_steps: int
    seed: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """From parsed arguments of the same names."""
        values: dict[str, Any] = {field.name: getattr(args, field.name) for field in fields(cls)}
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**(values | lists))

    def change_tokens(self, max_drafts: int) -> int:
        """The most that a sequence may generate before and after a change.

        There is room for the steps at its beginning in which not all of its batch decode.
        """
        return (1 + max_drafts) * (2 * self.change_steps + max(self.concurrency)) if self.change_steps else 0
