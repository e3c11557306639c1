"""Folders that appear whole or not at all, for downloaded and converted models."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from server.errors import ModelError

_TEMPORARY_PREFIX = ".outrider-"


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Where converted models are kept: $XDG_CACHE_HOME/outrider, by default ~/.cache/outrider."""
    # The specification says that a relative path is to be ignored.
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "outrider"


def publish_folder(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, first made by `build` if it does not exist.

    `build` fills a fresh folder beside the target, which is then renamed: other processes see
    all of it or nothing. Of two that build at once the later one throws its copy away. What
    killed processes have left there is deleted first.

    Raises: ModelError if the disk is full or the folder cannot be written; errors of `build` as they are.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(target.parent) as temporary:
            built = temporary / target.name
            built.mkdir()
            build(built)
            _rename(built, target)
    except OSError as error:
        raise _storage_error(target, error) from error
    return target


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A folder in `parent` that is deleted at the end; those of processes that live no more are deleted at once.

    Its maker holds a lock on a file in it, which ends with the process, however that ends.
    Raises: OSError.
    """
    for path in parent.glob(f"{_TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(path):  # its maker lives, or the file system knows no locks
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        path = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=parent))
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        try:
            stack.enter_context(_locked(path))
        except (BlockingIOError, FileNotFoundError):  # swept away by another process before it was locked
            path = stack.enter_context(temporary_folder(parent))
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        yield path


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises: OSError; BlockingIOError if another process holds it."""
    with (folder / "lock").open("wb") as file:  # not inherited by child processes
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "lock").stat()  # fails if it was deleted between the two
        yield


def _rename(temporary: Path, target: Path) -> None:
    try:
        temporary.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not target.is_dir():
            raise


def _storage_error(target: Path, error: OSError) -> ModelError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelError(f"no space left for {target}: free some, or set XDG_CACHE_HOME to a folder on a larger disk")
    return ModelError(
        f"cannot write {target}: {error.strerror or error}; set XDG_CACHE_HOME to a folder that can be written"
    )
