"""Servers that share the work, as a client of them sees it, and what they count meanwhile."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from clients.aio import AsyncClient
from clients.disaggregated import DisaggregatedClient
from clients.outputs import GenerationOutput
from protos.outrider.v1 import inference_pb2 as pb
from tests.fakes.eventually import eventually_stats
from tests.fakes.front import NO_RETRY

SETTLE_TIMEOUT_S = 60.0
PATIENCE_S = 120.0
"""A machine that is busy with other things is no node that hangs."""
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.9, "seed": 4}}


@dataclass(frozen=True, slots=True)
class Counts:
    """What a node has counted.

    Attributes:
        computed: tokens of prompts. loaded: those of them that a connector brought. hits: those found in the cache,
            where what was loaded is found too.
    """

    computed: int
    hits: int
    loaded: int
    failed_loads: int

    @classmethod
    def of(cls, stats: pb.GetStatsResponse) -> "Counts":
        """As its statistics have them."""
        return cls(
            stats.prompt_tokens - stats.prefix_hit_tokens,
            stats.prefix_hit_tokens,
            stats.external_loaded_tokens,
            stats.num_failed_loads,
        )

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(
            self.computed - other.computed,
            self.hits - other.hits,
            self.loaded - other.loaded,
            self.failed_loads - other.failed_loads,
        )


class Hop:
    """Nodes that share the work.

    Attributes:
        client: of all of them. prefill, decode: clients of one each.
    """

    def __init__(self, client: DisaggregatedClient, prefill: Sequence[AsyncClient], decode: Sequence[AsyncClient]):
        self.client = client
        self.prefill = prefill
        self.decode = decode

    async def counts(self, node: AsyncClient | None = None) -> Counts:
        """Of a node; of the first decode node if none is given."""
        return Counts.of(await (node or self.decode[0]).stats())

    async def settle(self) -> None:
        """Every block of every node is free, with nothing else to do."""
        for node in (*self.prefill, *self.decode):
            await settle(node)


async def settle(node: AsyncClient) -> None:
    """Wait until every block of a node is free, with nothing else to do."""
    await eventually_stats(node, _is_quiet, timeout_s=SETTLE_TIMEOUT_S)


def _is_quiet(stats: pb.GetStatsResponse) -> bool:
    has_nothing = not (stats.num_running or stats.num_waiting or stats.num_held_blocks)
    return has_nothing and stats.kv_blocks_free == stats.kv_blocks_total


@asynccontextmanager
async def hop_between(
    prefill: Sequence[str], decode: Sequence[str], *, hang_timeout_s: float = PATIENCE_S
) -> AsyncIterator[Hop]:
    """Args: prefill, decode: targets. Every prompt makes the hop, whoever has seen it before."""
    async with AsyncExitStack() as stack:
        client = DisaggregatedClient(
            prefill=prefill,
            decode=decode,
            min_prompt_tokens=0,
            remembers_prompts=False,
            hang_timeout_s=hang_timeout_s,
        )
        await stack.enter_async_context(client)
        first, second = [
            [await stack.enter_async_context(AsyncClient(target, retry=NO_RETRY)) for target in targets]
            for targets in (prefill, decode)
        ]
        yield Hop(client, first, second)


def ids(output: GenerationOutput) -> list[tuple[int, ...]]:
    """Of all choices."""
    return [choice.token_ids for choice in output.choices]


def full_tokens(length: int, block_size: int = 16) -> int:
    """Tokens of a prompt of this length that can come to the node that goes on: those of its full blocks."""
    return length // block_size * block_size
