"""Folders that appear whole or not at all, for downloaded and converted models."""

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from server.errors import ModelError
from server.temporary_folder import temporary_folder


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
