"""How many drafts each row may verify in a step: what decides it, and the simplest that does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a step may verify, and what it is to prepare for the next one.

    Attributes:
        max_drafts: most drafts of a row.
        probed_drafts, num_probed: most drafts of so many rows instead, from `first_probed` on.
        next_drafts: most drafts of a row that are proposed for the step after.
        is_steady: whether the step verifies what it may, and proposes as many: its duration says what they cost.
    """

    max_drafts: int
    next_drafts: int
    probed_drafts: int = 0
    num_probed: int = 0
    first_probed: int = 0
    is_steady: bool = True

    def of_row(self, index: int, num_rows: int) -> int:
        """Most drafts of one of the step's rows."""
        if self.num_probed and (index - self.first_probed) % num_rows < self.num_probed:
            return self.probed_drafts
        return self.max_drafts


class DraftPolicy(Protocol):
    """Decides for each step; owned by the scheduler.

    Attributes:
        is_adaptive: whether it verifies fewer drafts where they do not pay.
    """

    is_adaptive: ClassVar[bool]

    def allow(self, num_rows: int, num_new: int = 0) -> Allowance:
        """For the next step, which will have about so many rows; if 0, those of about `num_new` new sequences."""

    def settle_row(self, allowance: Allowance, allowed: int, num_accepted: int) -> None:
        """Learn from a row that was allowed to verify `allowed` drafts."""

    def settle_step(self, allowance: Allowance, num_rows: int, duration_s: float) -> None:
        """Learn from a step in which all rows decoded."""


class FixedPolicy:
    """As many as configured, by the number of rows if so wished."""

    is_adaptive: ClassVar[bool] = False

    def __init__(self, max_drafts: int, by_batch_size: Mapping[int, int] | None = None) -> None:
        """Args: by_batch_size: from so many rows on so many drafts; below the least of them max_drafts."""
        self._max_drafts = max_drafts
        self._by_batch_size = sorted((by_batch_size or {}).items())

    def allow(self, num_rows: int, num_new: int = 0) -> Allowance:
        """By the number of rows alone."""
        drafts = self._max_drafts
        for least, number in self._by_batch_size:
            if max(1, num_rows or num_new) >= least:
                drafts = min(number, self._max_drafts)
        return Allowance(drafts, drafts)

    def settle_row(self, allowance: Allowance, allowed: int, num_accepted: int) -> None:
        """Learns nothing."""

    def settle_step(self, allowance: Allowance, num_rows: int, duration_s: float) -> None:
        """Learns nothing."""
