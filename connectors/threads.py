"""Threads that may hang in a system call for ever without keeping the process alive."""

import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Threads:
    """Runs work in order of its coming, on some daemon threads that start with the first of it."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_ending = False

    def submit(self, work: Callable[[], None]) -> None:
        """Have something run; what it raises is logged. Dropped once `end` was called."""
        if self._is_ending:
            return
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name=f"{self._name}-{i}", daemon=True) for i in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        self._work.put(work)

    def end(self, timeout_s: float) -> bool:
        """Take no more work, and wait for what there is. Returns: whether all of it was done in time."""
        self._is_ending = True
        for _ in self._threads:
            self._work.put(None)
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                logger.exception("%s failed", self._name)
            del work  # with what it holds, which may be large, while there is no other
