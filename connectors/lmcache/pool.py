"""The memory that LMCache's server shares with the processes of its machine."""

import mmap
import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from connectors.lmcache.failure import LMCacheFailure

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"/?(lmcache_l1_pool_[\w.-]+)")


class LMCachePool:
    """A server's pool, mapped into this process; used from several threads.

    A server that starts makes a new one, under the same name: by that, one that was started again is told from the
    one that was there before, although it answers at the same address.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        """Args: name, nbytes: as the server says. Raises: LMCacheFailure if there is no such memory here."""
        match = _NAME.fullmatch(name)
        if match is None or nbytes <= 0:
            raise LMCacheFailure(
                f"it shares no memory ({name!r}); start it with --shm-name and --no-l1-use-lazy, on this machine"
            )
        self._path = FOLDER / match[1]
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._identity = _identity(os.fstat(file))
                self._map = mmap.mmap(file, nbytes)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise LMCacheFailure(f"the memory that it shares, {self._path}, cannot be used: {error}") from error
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def is_current(self) -> bool:
        """Whether the server still has this one."""
        try:
            return _identity(os.stat(self._path)) == self._identity
        except OSError:
            return False

    def slot(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """A part of it; the memory stays while somebody has one. Raises: LMCacheFailure if it is not inside."""
        if not 0 <= offset <= self._bytes.nbytes - nbytes:
            raise LMCacheFailure(f"it names {nbytes} bytes at {offset} of a memory of {self._bytes.nbytes}")
        return self._bytes[offset : offset + nbytes]


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
