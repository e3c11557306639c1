"""Warnings of what may happen with every block, and would fill the log."""

import logging
import math
import threading
import time
from collections.abc import Callable

REPEAT_AFTER_S = 60.0
MAX_KINDS = 64
"""Further kinds, as they may follow from what clients say, are taken for one."""
_ANY_OTHER = ""


class RareLog:
    """Logs a kind of warning at most once a minute; used from any thread."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}

    def warning(self, kind: str, message: str, *args: object) -> None:
        """Log it, or count it and have the next one of its kind tell."""
        with self._lock:
            now_s = self._clock()
            kind = self._kind(kind, now_s)
            logged_s, num_unsaid = self._kinds.get(kind, (-math.inf, 0))
            is_due = now_s - logged_s >= REPEAT_AFTER_S
            self._kinds[kind] = (now_s, 0) if is_due else (logged_s, num_unsaid + 1)
        if is_due:
            unsaid = f" ({num_unsaid} more like this before)" if num_unsaid else ""
            self._logger.warning("%s%s", message % args, unsaid)

    def _kind(self, kind: str, now_s: float) -> str:
        """The kind, or the one of all others if so many were logged within the last minute."""
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            recent = {old: state for old, state in self._kinds.items() if now_s - state[0] < REPEAT_AFTER_S}
            self._kinds = recent
            if len(recent) >= MAX_KINDS:
                return _ANY_OTHER
        return kind
