"""The mailbox between engine and one caller: it holds what was not read yet, merged."""

import asyncio
from collections import deque
from itertools import chain

from server.engine.detokenize import Piece
from server.engine.protocol import Delta, Finished, StreamEvent
from server.errors import OutriderError


class Mailbox:
    """A coalescing RequestStream; used from the event loop only, read by one task.

    A slow reader finds fewer, larger deltas. Memory is bounded by the request's own output, and
    putting something in never waits.
    """

    def __init__(self, request_id: str, interval: int = 1) -> None:
        """Args: interval: tokens of a choice that gather before they can be read, but for the first and the last."""
        self.request_id = request_id
        self.finished: list[Finished] = []
        self._interval = interval
        self._num_gathered: dict[int, int] = {}
        self._gathering: dict[int, list[Piece]] = {}
        self._first: deque[StreamEvent] = deque()
        self._unread: dict[int, list[Piece]] = {}
        self._finished: deque[Finished] = deque()
        self._error: OutriderError | None = None
        self._is_closed = False
        self._reader: asyncio.Future[None] | None = None

    def put_first(self, event: StreamEvent) -> None:
        """An event that goes before all deltas that were not read yet."""
        self._first.append(event)
        self._wake()

    def put_piece(self, index: int, piece: Piece) -> None:
        """More text and tokens of one choice."""
        if self._interval > 1 and self._gathers(index, piece):
            return
        self._hand_out(index, piece)
        self._wake()

    def put_finished(self, finished: Finished) -> None:
        """The end of one choice; goes after its deltas."""
        self._hand_out_gathered(finished.index)
        self.finished.append(finished)
        self._finished.append(finished)
        self._wake()

    def close(self, error: OutriderError | None = None) -> None:
        """No more will come; an error is raised once everything before it was read."""
        if not self._is_closed:
            self._is_closed = True
            self._error = error
            for index in list(self._gathering):
                self._hand_out_gathered(index)
            self._wake()

    def __aiter__(self) -> "Mailbox":
        """Iterates over events until the mailbox is closed and empty."""
        return self

    async def __anext__(self) -> StreamEvent:
        """The next event. Raises: the error it was closed with, once there is nothing before it."""
        while (event := self._next_nowait()) is None:
            if self._error is not None:
                raise self._error
            if self._is_closed:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return event

    def _gathers(self, index: int, piece: Piece) -> bool:
        """Keep a piece back until there are enough tokens. Returns: whether it was kept back."""
        num_gathered = self._num_gathered.get(index, self._interval) + len(piece.token_ids)
        if num_gathered < self._interval:
            self._gathering.setdefault(index, []).append(piece)
            self._num_gathered[index] = num_gathered
            return True
        self._hand_out_gathered(index)
        self._num_gathered[index] = 0
        return False

    def _hand_out(self, index: int, piece: Piece) -> None:
        unread = self._unread.get(index)
        if unread is None:
            self._unread[index] = [piece]
        else:
            unread.append(piece)

    def _hand_out_gathered(self, index: int) -> None:
        for piece in self._gathering.pop(index, ()):
            self._hand_out(index, piece)

    def _wake(self) -> None:
        """Let the reader go on, once for all that comes until it does."""
        if self._reader is not None:
            if not self._reader.done():  # as it is if the reader was cancelled
                self._reader.set_result(None)
            self._reader = None

    def _next_nowait(self) -> StreamEvent | None:
        if self._first:
            return self._first.popleft()
        if self._finished and self._finished[0].index not in self._unread:
            return self._finished.popleft()
        if not self._unread:
            return None
        index = next(iter(self._unread))
        pieces = self._unread.pop(index)
        if len(pieces) == 1:  # read in time
            return Delta(index, *pieces[0])
        text, token_ids, logprobs = zip(*pieces, strict=True)
        return Delta(index, "".join(text), tuple(chain(*token_ids)), tuple(chain(*logprobs)))
