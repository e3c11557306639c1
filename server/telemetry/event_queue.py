"""Takes events off the engine's threads, so that telemetry costs them one append."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from server.events import Event

_logger = logging.getLogger(__name__)

MAX_QUEUED_EVENTS = 1 << 16
_ERROR_LOG_INTERVAL = 1000


class EventQueue:
    """A bounded queue and the one thread that feeds its events to spans and metrics.

    Making a span takes tens of microseconds and recording one observation a few; a
    message of thousands of tokens records thousands. Neither belongs on the event loop
    or the step thread. Any thread may put; the subscribers run on the queue's thread.
    """

    def __init__(self, subscribers: Sequence[Callable[[Event], None]]) -> None:
        self._subscribers = tuple(subscribers)
        self._events: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._num_dropped = 0
        self._num_errors = 0
        self._thread = threading.Thread(target=self._consume, name="telemetry", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Events that were discarded because the queue was full."""
        return self._num_dropped

    def put_nowait(self, event: Event) -> None:
        """Queue an event, or count it as dropped while the queue is full."""
        if self._events.qsize() >= MAX_QUEUED_EVENTS:
            self._num_dropped += 1
        else:
            self._events.put(event)

    def wait_processed(self, timeout_s: float) -> bool:
        """Wait until every event put before this call was processed; False after `timeout_s`."""
        marker = threading.Event()
        self._events.put(marker)
        return marker.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Process what is queued and end the thread; give up waiting after `timeout_s`."""
        self._events.put(None)
        self._thread.join(timeout_s)

    def _consume(self) -> None:
        while (item := self._events.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            for subscriber in self._subscribers:
                try:
                    subscriber(item)
                except Exception:  # a bug in one metric must not end all telemetry
                    if self._num_errors % _ERROR_LOG_INTERVAL == 0:
                        _logger.exception("telemetry could not record an event; generation is not affected")
                    self._num_errors += 1
