"""Which tokens grammars let follow, as packed bits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from server.guidance.grammar import Matcher
from server.host import cpu_count

if TYPE_CHECKING:
    from llguidance import LLExecutor

MAX_THREADS = 8


class MaskJob(NamedTuple):
    """Masks to be written for one choice: for its next token, and for the one behind each draft."""

    matcher: Matcher
    draft_ids: Sequence[int]


class MaskWriter:
    """Computes masks of many choices at once, on threads of its own and without the interpreter lock."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def write(self, jobs: Sequence[MaskJob], masks: npt.NDArray[np.uint32]) -> None:
        """Write each job's masks; matchers stay where they are, but may be in error afterwards.

        Args:
            masks: [jobs, positions, words], contiguous, overwritten: bit `token % 32` of word `token // 32` is set
                where the token is allowed. A position behind a draft that the grammar does not allow, or behind the
                text's end, allows everything, as does one that no draft leads to.
        """
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(min(cpu_count(), MAX_THREADS))
        masks.fill(0xFFFFFFFF)
        num_positions, num_words = masks.shape[1:]
        place = masks.ctypes.data, num_words * masks.itemsize, len(jobs) * num_positions
        numbered = [(i * num_positions, job) for i, job in enumerate(jobs)]
        if alone := [(job.matcher.raw, index) for index, job in numbered if not job.draft_ids]:
            self._executor.unsafe_compute_mask_ptr(alone, *place)
        if drafted := [(job.matcher.raw, index, list(job.draft_ids)) for index, job in numbered if job.draft_ids]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)
