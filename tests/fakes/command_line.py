"""Commands against a server, run in this process as a shell would run them."""

import asyncio
import io
import sys
from collections.abc import Awaitable, Callable

import pytest

from server import cli

Outrider = Callable[..., Awaitable[int]]
"""Takes a command and its arguments, and `stdin` as its input. Returns: the exit code."""


def outrider_at(target: str, monkeypatch: pytest.MonkeyPatch) -> Outrider:
    """Runs commands against the server at an address; on a thread, as they block."""

    async def run(command: str, *arguments: str, stdin: str = "") -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return await asyncio.to_thread(cli.main, [command, "--target", target, *arguments])

    return run
