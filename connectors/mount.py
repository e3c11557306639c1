"""The mount that a folder is on, and whether it is still there."""

import os
from pathlib import Path


def mount_of(folder: Path) -> Path | None:
    """Where the file system of a folder, which need not be there yet, is mounted; None if that is the machine's own.

    A part of the same file system that is mounted once more can not be told from a folder.
    """
    path = folder.resolve()
    return next((each for each in (path, *path.parents[:-1]) if os.path.ismount(each)), None)


def is_mounted(mount: Path | None) -> bool:
    """Whether there still is a mount; None, for no mount, always is."""
    return mount is None or os.path.ismount(mount)
