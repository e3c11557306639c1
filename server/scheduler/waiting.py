"""The sequences that wait for a seat."""

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile

from server.scheduler.sequence import Sequence


class WaitingQueue:
    """Waiting sequences, in order; owned by the scheduler."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._by_request: Counter[str] = Counter()

    @property
    def num_requests(self) -> int:
        """Requests of which at least one choice waits."""
        return len(self._by_request)

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates over a copy, so that sequences may be removed meanwhile."""
        return iter(tuple(self._sequences))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence where its order puts it."""
        insort(self._sequences, sequence, key=lambda s: s.order)
        self._by_request[sequence.request.request_id] += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        request_id = sequence.request.request_id
        self._sequences.remove(sequence)
        self._by_request[request_id] -= 1
        if not self._by_request[request_id]:
            del self._by_request[request_id]

    def before(self, sequence: Sequence) -> Iterator[Sequence]:
        """The waiting sequences that go before another one."""
        return takewhile(lambda waiting: waiting.order < sequence.order, self)
