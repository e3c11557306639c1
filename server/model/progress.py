"""Progress of the slow steps before a start, on stderr: drawn on a terminal, else a line for each."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator

from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def download_bar(message: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """Show a download of `nbytes`; what it yields takes the number of bytes that are there."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        _print_line(f"{message} ({filesize.decimal(nbytes)})")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task(message, total=nbytes)
        yield lambda completed: progress.update(bar, completed=completed)


@contextlib.contextmanager
def spinner(message: str) -> Iterator[None]:
    """Show `message` while the body runs."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        _print_line(message)
    with console.status(message) if console.is_terminal else contextlib.nullcontext():
        yield


def _print_line(message: str) -> None:
    print(f"outrider: {message}", file=sys.stderr, flush=True)


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
