"""Progress of the slow steps before a start: on stderr, and only if that is a terminal."""

import contextlib
import io
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """A rich Progress for byte counts that draws nothing where stderr is not a terminal."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield progress


@contextlib.contextmanager
def spinner(message: str) -> Iterator[None]:
    """Show `message` while the body runs, on a terminal only."""
    console = Console(file=sys.stderr)
    with console.status(message) if console.is_terminal else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def without_foreign_bars() -> Iterator[None]:
    """Keep transformers from drawing bars of its own, which it does into files and pipes too.

    Some of them cannot be switched off, so what is written to sys.stderr inside is dropped;
    loggers hold on to the real stream and still reach it. For start-up, not for threads.
    """
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
