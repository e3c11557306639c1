"""Waits for what has no event to wait for, such as the server's side of a cancelled call."""

import asyncio
from collections.abc import Callable

from clients.aio import AsyncClient
from protos.outrider.v1 import inference_pb2 as pb


async def eventually(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    """Let the loop run until `condition` holds. Raises: TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - nobody could set the event
            await asyncio.sleep(0.005)


async def eventually_stats(
    client: AsyncClient, condition: Callable[[pb.GetStatsResponse], bool], *, timeout_s: float = 30.0
) -> None:
    """Ask the server until its statistics fulfil `condition`. Raises: TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition(await client.stats()):  # noqa: ASYNC110 - the event would be the server's
            await asyncio.sleep(0.005)
