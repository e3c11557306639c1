"""Parsers of flags' values, each of which says what it takes."""

import argparse
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

_Value = TypeVar("_Value")


def integer(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None


def number(text: str) -> float:
    """Any number; what it may be, the server says."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def at_least(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text!r}")
        return int(text)

    return parse


def seconds(text: str) -> float:
    """A finite time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return value


def per_second(text: str) -> float:
    """A finite rate above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number per second above 0, got {text!r}")
    return value


def one_of(words: Collection[str]) -> Callable[[str], str]:
    """A parser of one of these words."""

    def parse(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(words)}, got {text!r}")
        return text

    return parse


def bias(text: str) -> tuple[int, float]:
    """ID:BIAS."""
    token_id, _, value = text.partition(":")
    return int(token_id), float(value)


def list_of(kind: Callable[[str], _Value], form: str) -> Callable[[str], list[_Value]]:
    """A parser of comma-separated values; empty text is the empty list.

    Args:
        form: how one of them is written, such as ID.
    """

    def parse(text: str) -> list[_Value]:
        try:
            return [kind(item) for item in text.split(",")] if text else []
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {form}[,{form}...], got {text!r}") from None

    return parse


def json_schema(text: str) -> str:
    """A schema, or the file that it is in; the shortest are `true` and `false`."""
    return text if text.strip() in ("true", "false") else file_or_text("{")(text)


def file_or_text(mark: str) -> Callable[[str], str]:
    """A parser of texts that may lie in a file.

    Args:
        mark: what every such text has in it, and hardly a file's name.
    """

    def parse(text: str) -> str:
        if not text.strip():
            raise argparse.ArgumentTypeError("must be a file or text, and is empty")
        if mark in text:
            return text
        try:
            return Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise argparse.ArgumentTypeError(
                f"{text!r} cannot be read as a file ({reason}), and is no text with {mark!r} in it"
            ) from None

    return parse


def target(text: str) -> str:
    """Where a server is; a port left out would be gRPC's guess, 443."""
    scheme, _, path = text.partition(":")
    host, _, port = text.rpartition(":")
    is_address = host and scheme not in ("http", "https") and port.isdecimal() and 0 < int(port) < 65536
    if not (path if scheme == "unix" else is_address):
        raise argparse.ArgumentTypeError(f"give HOST:PORT or unix:PATH, got {text!r}")
    return text
