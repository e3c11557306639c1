"""Keeps files of blocks within a number of bytes, together with other processes that do the same in one folder."""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from connectors.rare_log import RareLog

TEMPORARY_SUFFIX = ".tmp"
ABANDONED_AFTER_S = 3600.0
"""Age at which a file that was never finished is that of a process that has ended."""

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"[0-9a-f]{64}\.kv")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class _File:
    used_s: float
    nbytes: int
    path: str


class FolderBudget:
    """Removes the files that were used longest ago; nothing that is not named as one of ours is touched.

    Nobody counts for all processes: each looks through the folder again after it has written a part of what was
    free, and removes down to a little below the limit. So n processes may exceed it by n 64ths. There are no locks,
    which not every shared mount has: two that remove the same file are as good as one, and whoever has it open reads
    on. A file's time of use is its modification time, which readers renew.
    """

    def __init__(self, root: Path, max_bytes: int | None, clock: Callable[[], float] = time.time) -> None:
        """Args: max_bytes: None for no limit: then only what was never finished is removed, once."""
        self._root = root
        self._max_bytes = max_bytes
        self._clock = clock
        self._log = RareLog(logger)
        self._lock = threading.Lock()
        self._is_looking = False
        self._num_written = 0
        self._look_after = 0.0

    def wrote(self, nbytes: int) -> None:
        """A file was written; at times this looks through the folder. From any thread; the others do not wait."""
        with self._lock:
            self._num_written += nbytes
            if self._is_looking or self._num_written <= self._look_after:
                return
            self._is_looking = True
            self._num_written = 0
        look_after = self._tidy_up()
        with self._lock:
            self._is_looking = False
            self._look_after = look_after

    def _tidy_up(self) -> float:
        """Returns: bytes that may be written until it is time to look again."""
        files = sorted(self._files())
        if self._max_bytes is None:
            return float("inf")
        step = self._max_bytes // 64
        total = sum(file.nbytes for file in files)
        if total > self._max_bytes - step:
            total -= self._remove(files, total - (self._max_bytes - 4 * step))
        return max((self._max_bytes - total) // 2, step)

    def _remove(self, files: list[_File], excess: int) -> int:
        """Remove the first of these until so many bytes are gone. Returns: how many are."""
        removed = 0
        for file in files:
            if removed >= excess:
                break
            try:
                os.unlink(file.path)
            except FileNotFoundError:
                pass  # by another process, or as unusable: gone all the same
            except OSError as error:
                self._log.warning("remove", "%s can not be removed: %s", file.path, error.strerror)
                continue
            removed += file.nbytes
        return removed

    def _abandoned_s(self) -> float:
        return self._clock() - ABANDONED_AFTER_S

    def _files(self) -> Iterator[_File]:
        """All blocks; what was never finished, and by now never will be, is removed on the way."""
        for namespace in _entries(self._root):
            for fan_out in _entries(namespace.path) if _NAMESPACE.fullmatch(namespace.name) else ():
                for entry in _entries(fan_out.path) if _FAN_OUT.fullmatch(fan_out.name) else ():
                    try:
                        status = entry.stat(follow_symlinks=False)
                        if _BLOCK.fullmatch(entry.name):
                            yield _File(status.st_mtime, status.st_size, entry.path)
                        elif entry.name.endswith(TEMPORARY_SUFFIX) and status.st_mtime < self._abandoned_s():
                            os.unlink(entry.path)
                    except OSError:
                        continue  # removed meanwhile


def _entries(folder: str | Path) -> list["os.DirEntry[str]"]:
    """What is in a folder; nothing if it is none, or gone."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
