"""A client process that is killed while its requests are in every phase: `python -m ... TARGET`."""

import asyncio
import sys

from clients.aio import AsyncClient


async def run(target: str) -> None:
    """Open one stream, then many that run, wait and tokenise beside it; say so, and stay."""
    async with AsyncClient(target) as client:
        deltas = aiter(client.generate("once", ignore_eos=True))
        await anext(deltas)
        others = [client.generate(f"{i} once " * (1 + 20 * (i % 4)), ignore_eos=True, n=1 + i % 2) for i in range(11)]
        for _ in range(5):
            await anext(deltas)
        print("begun", flush=True)
        await asyncio.gather(*(generation.result() for generation in others))


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
