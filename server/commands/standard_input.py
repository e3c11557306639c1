"""Standard input as text, whatever the locale says."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from server.errors import ConfigError


@contextmanager
def standard_input() -> Iterator[TextIO]:
    """Standard input as UTF-8, which is what the wire carries.

    Raises: ConfigError if it is closed, or if what the block reads is not UTF-8.
    """
    if sys.stdin is None:
        raise ConfigError("standard input is closed")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # the C locale would let bytes through
    try:
        yield sys.stdin
    except UnicodeDecodeError as error:
        raise ConfigError("standard input is not UTF-8") from error
