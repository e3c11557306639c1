"""Folders that do not outlast the process that made them, even if it is killed."""

import contextlib
import errno
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = ".outrider-"


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A folder in `parent` that is deleted at the end; those of processes that live no more are deleted at once.

    Its maker holds a lock on a file in it, which ends with the process, however that ends.
    Raises: OSError.
    """
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(path):  # its maker lives, or the file system knows no locks
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
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
