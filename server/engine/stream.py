"""The mailbox between engine and one caller: it holds what was not read yet, merged."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from server.engine.detokenize import Piece
from server.engine.protocol import Delta, Finished, PositionLogprobs, StreamEvent
from server.errors import OutriderError


@dataclass(slots=True)
class _Unread:
    """Pieces of one choice that were not read yet."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)


class Mailbox:
    """A coalescing RequestStream; used from the event loop only, read by one task.

    A slow reader finds fewer, larger deltas. Memory is bounded by the request's own output, and
    putting something in never waits.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.finished: list[Finished] = []
        self._first: deque[StreamEvent] = deque()
        self._unread: dict[int, _Unread] = {}
        self._finished: deque[Finished] = deque()
        self._error: OutriderError | None = None
        self._is_closed = False
        self._has_news = asyncio.Event()

    def put_first(self, event: StreamEvent) -> None:
        """An event that goes before all deltas that were not read yet."""
        self._first.append(event)
        self._has_news.set()

    def put_piece(self, index: int, piece: Piece) -> None:
        """More text and tokens of one choice."""
        unread = self._unread.setdefault(index, _Unread())
        unread.text.append(piece.text)
        unread.token_ids += piece.token_ids
        unread.logprobs += piece.logprobs
        self._has_news.set()

    def put_finished(self, finished: Finished) -> None:
        """The end of one choice; goes after its deltas."""
        self.finished.append(finished)
        self._finished.append(finished)
        self._has_news.set()

    def close(self, error: OutriderError | None = None) -> None:
        """No more will come; an error is raised once everything before it was read."""
        if not self._is_closed:
            self._is_closed = True
            self._error = error
            self._has_news.set()

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        """Yields events until the mailbox is closed and empty."""
        while True:
            event = self._next_nowait()
            if event is not None:
                yield event
            elif self._is_closed:
                if self._error is not None:
                    raise self._error
                return
            else:
                self._has_news.clear()
                await self._has_news.wait()

    def _next_nowait(self) -> StreamEvent | None:
        if self._first:
            return self._first.popleft()
        if self._finished and self._finished[0].index not in self._unread:
            return self._finished.popleft()
        if self._unread:
            index = next(iter(self._unread))
            unread = self._unread.pop(index)
            return Delta(index, "".join(unread.text), tuple(unread.token_ids), tuple(unread.logprobs))
        return None
