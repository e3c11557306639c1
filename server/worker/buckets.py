"""The shapes that steps of decoding rows are padded to, so that few captured graphs serve all of them."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

LARGEST = 512
"""Rows of the largest bucket: what is larger takes long enough to hide its launches."""
_SMALL = (1, 2, 4, 8, 16, 24, 32)


class Bucket(NamedTuple):
    """Rows of a step, and query tokens of each."""

    num_rows: int
    num_query: int


class Buckets:
    """The limits of a batch, and the shapes that are captured for it; none until `sizes` says so.

    Attributes:
        spare_slot: the slot that padding rows name. max_query: most query tokens of a row that verifies drafts.
        max_context: no position reaches it; captured attention is cut for it.
        is_second_captured: whether a step's second segment is captured too.
    """

    def __init__(
        self,
        *,
        spare_slot: int,
        max_query: int,
        max_context: int,
        sizes: Sequence[int] = (),
        is_second_captured: bool = True,
    ) -> None:
        """Args: sizes: ascending numbers of rows to capture, see `batch_sizes`."""
        self.is_second_captured = is_second_captured
        self.spare_slot = spare_slot
        self.max_query = max_query
        self.max_context = max_context
        self._sizes = tuple(sizes)
        self._lengths = sorted({1, max_query})

    def with_sizes(self, sizes: Sequence[int], *, is_second_captured: bool) -> "Buckets":
        """The same limits with these numbers of rows."""
        return Buckets(
            spare_slot=self.spare_slot,
            max_query=self.max_query,
            max_context=self.max_context,
            sizes=sizes,
            is_second_captured=is_second_captured,
        )

    def fit(self, num_rows: int, num_query: int) -> Bucket | None:
        """The smallest bucket for so many rows and query tokens, at most `max_query`; None if they are too many."""
        place = bisect_left(self._sizes, num_rows)
        if place == len(self._sizes):
            return None
        return Bucket(self._sizes[place], 1 if num_query == 1 else self.max_query)

    def __iter__(self) -> Iterator[Bucket]:
        """All buckets, the largest first."""
        return (Bucket(size, length) for length in reversed(self._lengths) for size in reversed(self._sizes))


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows to capture for a batch of at most so many: steps of 8 to 32, then two to each doubling."""
    sizes = list(_SMALL)
    while sizes[-1] < LARGEST:
        sizes.append(2 * sizes[-2])
    return sorted({*(size for size in sizes if size < max_num_seqs), min(max_num_seqs, LARGEST)})
