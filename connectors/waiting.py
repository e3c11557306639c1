"""Waiting for what other threads do, until a time, or until somebody says stop."""

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

_Result = TypeVar("_Result", covariant=True)


class Awaited(Protocol[_Result]):
    """A future, of whatever library."""

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Have something called once it is done, or at once."""

    def done(self) -> bool:
        """Whether there is a result or an error."""

    def result(self) -> _Result:
        """The result. Raises: the error."""

    def cancel(self) -> object:
        """Nobody waits for it any more."""


class Stopped(Exception):
    """Somebody said stop."""


class Waiting:
    """Waits on one thread at a time; any thread can stop it, for good."""

    def __init__(self, clock: Callable[[], float], until_s: float) -> None:
        """Args: until_s: how long, on that clock."""
        self._clock = clock
        self._until_s = until_s
        self._changed = threading.Event()
        self._is_stopped = False

    @property
    def left_s(self) -> float:
        """Seconds that are left. Raises: TimeoutError if there are none."""
        left_s = self._until_s - self._clock()
        if left_s <= 0:
            raise TimeoutError("its time is up")
        return left_s

    def result(self, awaited: Awaited[_Result]) -> _Result:
        """Its result; cancels it if that does not come.

        Raises: its error, TimeoutError, Stopped.
        """
        awaited.add_done_callback(lambda _: self._changed.set())
        try:
            while not awaited.done():
                left_s = self.left_s
                if self._is_stopped:
                    raise Stopped
                self._changed.wait(left_s)
                self._changed.clear()
        except BaseException:
            awaited.cancel()
            raise
        return awaited.result()

    def stop(self) -> None:
        """Have whoever waits raise soon; never waits itself."""
        self._is_stopped = True
        self._changed.set()
