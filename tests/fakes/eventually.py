"""Waits for what has no event to wait for, such as the server's side of a cancelled call."""

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    """Let the loop run until `condition` holds. Raises: TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - nobody could set the event
            await asyncio.sleep(0.005)
