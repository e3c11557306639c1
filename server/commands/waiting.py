"""Shows on a terminal that something is awaited."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def waiting_for(what: str) -> Iterator[Callable[[], None]]:
    """A spinner on stderr until the yielded function is called or the block ends; nothing if that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console

    status = Console(stderr=True).status(what)
    status.start()
    try:
        yield status.stop
    finally:
        status.stop()
