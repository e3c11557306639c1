"""Sends several kinds of requests at given times and measures each kind by itself."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clients.bench import Generating, Load, Sender
from clients.measurements import Measurements
from clients.workload import Prompt

_clock = time.perf_counter


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is to be sent, whether or not earlier ones have ended.

    Attributes: at_s: since the start.
    """

    at_s: float
    kind: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class MixedResult:
    """What a run measured.

    Attributes:
        by_kind: of the requests of each kind.
        duration_s: from the start to the last answer. client_cpu_s: what this process itself computed meanwhile.
    """

    by_kind: Mapping[str, Measurements]
    duration_s: float
    client_cpu_s: float


async def run_arrivals(
    client: Generating, arrivals: Sequence[Arrival], *, timeout_s: float | None = None
) -> MixedResult:
    """Send them all, greedily and each to its full length.

    Args:
        arrivals: in the order of their times. timeout_s: deadline of each call; None has none.
    """
    load = Load(num_prompts=len(arrivals), temperature=0.0, ignore_eos=True, timeout_s=timeout_s)
    by_kind = {kind: Measurements() for kind in sorted({arrival.kind for arrival in arrivals})}
    senders = {kind: Sender(client, load, measurements) for kind, measurements in by_kind.items()}
    cpu_before_s, start_s = time.process_time(), _clock()
    async with asyncio.TaskGroup() as tasks:
        for arrival in arrivals:
            scheduled_s = start_s + arrival.at_s
            await asyncio.sleep(max(0.0, scheduled_s - _clock()))
            tasks.create_task(senders[arrival.kind].send(arrival.prompt, scheduled_s))
    return MixedResult(by_kind, _clock() - start_s, time.process_time() - cpu_before_s)
