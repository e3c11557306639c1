"""Blocks as files of a folder, which may be on a mount that several machines share."""

import errno
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from pydantic import Field

from connectors.folder_budget import TEMPORARY_SUFFIX, FolderBudget
from connectors.mount import is_mounted, mount_of
from connectors.rare_log import RareLog
from connectors.save_failure import SaveFailure
from connectors.store import BlockStore
from connectors.store_config import StoreConfig
from connectors.wire import HEADER_NBYTES, find_fault, namespace_digest, pack_header
from server.config_values import ByteCount
from server.errors import ConfigError

RENEW_AFTER_S = 60.0
"""A file's time of use is renewed if it is older: with each use it would cost a write to the mount each time."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

logger = logging.getLogger(__name__)


class FilesystemConfig(StoreConfig):
    """Settings of blocks in files."""

    shared_storage_path: str = Field(min_length=1, description="folder of the files; made if it is not there")
    max_bytes: ByteCount | None = Field(
        default=32 << 30,
        ge=1 << 20,
        description="about how much all blocks in the folder may take, such as 32GiB; those used longest ago go first",
    )

    require_mount: bool = Field(
        default=False, description="refuse a folder that is on no mount, as where that of a shared file system failed"
    )

    def open_store(self) -> BlockStore:
        """The store in that folder. Raises: ConfigError if it cannot be made, or is not on a mount and must be."""
        root = Path(self.shared_storage_path).expanduser().absolute()
        mount = mount_of(root)
        if self.require_mount and mount is None:
            raise ConfigError(f"shared_storage_path: {root} is on no mount, and require_mount is set")
        logger.info("blocks are kept in %s, on %s", root, "no mount" if mount is None else f"mount {mount}")
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"shared_storage_path: {root} cannot be made: {error.strerror}") from error
        return FilesystemStore(root, self.max_bytes, mount=mount)


class FilesystemStore:
    """A file for each block, `namespace/first byte of the hash/hash.kv`; implements connectors.store.BlockStore.

    A file is written beside its place, synchronised and renamed, so that readers in any process find all of it or
    nothing. Nobody locks: two writers of a block write the same bytes, and the last rename holds. Its form is that of
    connectors.wire; whatever does not have it to the last bit is a miss and is removed.
    """

    def __init__(self, root: Path, max_bytes: int | None = None, *, mount: Path | None = None) -> None:
        """Args:
        root: a folder that exists. max_bytes: see FolderBudget.
        mount: what it is on: nothing is written while that is gone, as it would fill the disk below.
        """
        self._root = root
        self._mount = mount
        self._budget = FolderBudget(root, max_bytes)
        self._log = RareLog(logger)

    def expect(self, namespace: str, block_nbytes: int) -> None:
        """Each block brings its size."""

    def find(self, namespace: str, hashes: Sequence[bytes]) -> int:
        """One look at the folder for each block until one is missing."""
        for count, block_hash in enumerate(hashes):
            try:
                os.stat(self._path(namespace, block_hash))
            except FileNotFoundError:
                return count
            except OSError as error:
                self._log.warning("find", "no block can be found in %s: %s", self._root, error.strerror)
                return count
        return len(hashes)

    def load(self, namespace: str, block_hash: bytes, into: memoryview) -> bool:
        """Read straight into the buffer."""
        path = self._path(namespace, block_hash)
        header = bytearray(HEADER_NBYTES)
        nbytes = HEADER_NBYTES + into.nbytes
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                status = os.fstat(file)
                is_whole = status.st_size == nbytes and _read(file, [memoryview(header), into]) == nbytes
                if time.time() - status.st_mtime > RENEW_AFTER_S:
                    _renew(file)
            finally:
                os.close(file)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._log.warning("load", "%s cannot be read: %s", path, error.strerror)
            return False
        if is_whole:
            fault = find_fault(header, namespace, block_hash, into)
        else:
            fault = f"it has {status.st_size} bytes instead of {nbytes}"
        if fault is None:
            return True
        logger.warning("%s is removed: %s", path, fault)
        with suppress(OSError):
            os.unlink(path)
        return False

    def save(self, namespace: str, block_hash: bytes, data: memoryview) -> SaveFailure | None:
        """Write a file, unless there is one of the right size, whose time of use is renewed instead."""
        if not is_mounted(self._mount):
            self._log.warning("save", "blocks are not kept in %s: %s is not mounted any more", self._root, self._mount)
            return SaveFailure.UNAVAILABLE
        path = self._path(namespace, block_hash)
        nbytes = HEADER_NBYTES + data.nbytes
        try:
            if _has(path, nbytes):
                return None
            _write(path, [memoryview(pack_header(namespace, block_hash, data)), data])
        except OSError as error:
            self._log.warning("save", "blocks are not kept in %s: %s", self._root, error.strerror)
            return SaveFailure.FULL if error.errno in _NO_ROOM else SaveFailure.UNAVAILABLE
        self._budget.wrote(nbytes)
        return None

    def close(self) -> None:
        """Nothing is open."""

    def _path(self, namespace: str, block_hash: bytes) -> str:
        name = block_hash.hex()
        return f"{self._root}/{namespace_digest(namespace).hex()}/{name[:2]}/{name}.kv"


def _has(path: str, nbytes: int) -> bool:
    """Whether there is a file of this size, which then counts as used."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return False
    if status.st_size != nbytes:
        return False
    if time.time() - status.st_mtime > RENEW_AFTER_S:
        _renew(path)
    return True


def _renew(file: int | str) -> None:
    """Note that a file is in use; whoever may not, reads it all the same."""
    with suppress(OSError):
        os.utime(file)


def _read(file: int, buffers: list[memoryview]) -> int:
    """Fill the buffers one after the other. Returns: how many bytes there were."""
    rest, done = [buffer.cast("B") for buffer in buffers], 0
    while rest and (count := os.preadv(file, rest, done)):
        done += count
        rest = _behind(rest, count)
    return done


def _write(path: str, buffers: list[memoryview]) -> None:
    """Make a file of the buffers that is there as a whole or not at all. Raises: OSError; then nothing is left."""
    temporary = f"{path}.{uuid4().hex}{TEMPORARY_SUFFIX}"
    folder = os.path.dirname(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        file = os.open(temporary, flags, 0o666)
    except FileNotFoundError:
        os.makedirs(folder, exist_ok=True)
        file = os.open(temporary, flags, 0o666)
    try:
        try:
            rest = [buffer.cast("B") for buffer in buffers]
            while rest:
                rest = _behind(rest, os.writev(file, rest))
            os.fsync(file)
        finally:
            os.close(file)
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _synchronise(folder)


def _behind(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers behind so many bytes."""
    while buffers and count >= buffers[0].nbytes:
        count -= buffers[0].nbytes
        buffers = buffers[1:]
    return [buffers[0][count:], *buffers[1:]] if count else buffers


def _synchronise(folder: str) -> None:
    """Have the names in a folder outlast a loss of power, where the mount can."""
    with suppress(OSError):  # a folder cannot be opened, or synchronised, on every mount
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
