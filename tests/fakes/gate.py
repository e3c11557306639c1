"""A place on the way between two nodes where bytes are held back when a test wants it; the `change` of a Relay."""

import threading

TIMEOUT_S = 60.0


class Gate:
    """Open to begin with.

    Attributes:
        reached: whether bytes are held back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: int | None = None
        self._loses = False
        self._opened = threading.Event()
        self.reached = threading.Event()

    def close(self, after_nbytes: int) -> None:
        """Let so many bytes through, of all connections together, then none."""
        with self._lock:
            self._left = after_nbytes
            self._opened.clear()
            self.reached.clear()

    def open(self, *, loses: bool = False) -> None:
        """Let everything through. Args: loses: what is held back is lost, and so are its connections."""
        with self._lock:
            self._left = None
            self._loses = loses
            self._opened.set()

    def __call__(self, data: bytes, _: int) -> bytes | None:
        with self._lock:
            if self._left is None:
                return data
            self._left -= len(data)
            if self._left >= 0:
                return data
        self.reached.set()
        assert self._opened.wait(TIMEOUT_S)
        return None if self._loses else data
