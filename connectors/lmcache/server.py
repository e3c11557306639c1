"""LMCache's server as a store uses it: connected to when needed, and left alone for a while after it failed."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from connectors.lmcache.failure import LMCacheFailure
from connectors.lmcache.link import LMCacheLink

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class LMCacheServer:
    """A link that is replaced when it has failed, or when the server was started again; used from several threads."""

    def __init__(self, url: str, timeout_s: float, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: pause_s: how long the server is left alone after a failure."""
        self._url = url
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._link: LMCacheLink | None = None
        self._paused_until_s = -1.0
        self._has_failed = False
        self._is_closed = False

    def attempt(self, work: Callable[[LMCacheLink], _Result], otherwise: _Result) -> _Result:
        """Do work on a link. Returns: `otherwise` if the server is left alone, or fails at it."""
        link = None
        try:
            with ExitStack() as using:
                with self._lock:
                    link = self._current()
                    if link is None:
                        return otherwise
                    using.enter_context(link.in_use())
                result = work(link)
        except LMCacheFailure as failure:
            self._fail(link, failure)
            return otherwise
        if self._has_failed:
            self._has_failed = False
            logger.warning("the LMCache server at %s is used again", self._url)
        return result

    def close(self) -> None:
        """Give up the link; nothing is attempted any more."""
        with self._lock:
            self._is_closed = True
            self._drop()

    def _current(self) -> LMCacheLink | None:
        """The link, a new one if need be; None while the server is left alone. Raises: LMCacheFailure."""
        if self._is_closed or self._clock() < self._paused_until_s:
            return None
        if self._link is not None and not self._link.is_current():
            logger.warning("the LMCache server at %s was stopped, or started again", self._url)
            self._drop()
        if self._link is None:
            self._link = LMCacheLink(self._url, self._timeout_s)
        return self._link

    def _fail(self, link: LMCacheLink | None, failure: LMCacheFailure) -> None:
        """Leave the server alone, unless another thread has found out before and has a new link already."""
        with self._lock:
            if link is not self._link:
                return
            self._paused_until_s = self._clock() + self._pause_s
            self._drop()
        if not self._has_failed:
            self._has_failed = True
            logger.warning(
                "the LMCache server at %s is not used for now: %s; nothing is found or kept there, "
                "and it is tried again every %g s",
                self._url,
                failure,
                self._pause_s,
            )

    def _drop(self) -> None:
        if self._link is not None:
            self._link.retire()
            self._link = None
