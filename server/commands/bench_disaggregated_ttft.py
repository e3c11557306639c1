"""How soon a prompt's first token comes where its KV is found elsewhere, and where it is computed."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from clients.aio import AsyncClient
from clients.async_stream import uncancelled
from clients.nodes import Node
from clients.progress import Progress
from clients.requests import generate_request
from clients.workload import Prompt, random_prompts
from protos.outrider.v1 import inference_pb2 as pb
from server.commands.bench_disaggregated_connectors import Setup
from server.commands.bench_disaggregated_cores import Cores
from server.commands.bench_disaggregated_load import Load
from server.commands.bench_disaggregated_node import HANG_TIMEOUT_S, NO_RETRY, BlockShape, ServerNode, Starter
from server.errors import OutriderError

_clock = time.perf_counter
_SPARE_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Timed:
    """One prompt.

    Attributes:
        recomputed_s: until the first token on a node that has nothing of it. found_s: on one that finds its KV.
        num_found: tokens that it found.
    """

    recomputed_s: float
    found_s: float
    num_found: int


async def measure_ttft(
    starter: Starter,
    load: Load,
    cores: Cores,
    setup: Setup,
    blocks: BlockShape,
    say: Callable[[str], None],
    found: list[Timed],
) -> None:
    """Prompts one after the other, alone; found and recomputed on the same cores, by turns.

    The node of the connector `memory` has no other one: its cache has room for two prompts only, and the one before
    these is found in memory. With all others the prompt is computed on a prefill node, and found on a decode node.
    Their caches have no more room: behind the first turn all blocks have been used before. The first use of memory
    costs as much as to move the block there, or more.

    Args: say: called with what is measured next. found: turns that count are added as they end.
    Raises: OutriderError if KV was not found.
    """
    say(f"TTFT, {setup.name}")
    measure = _measure_memory if setup.name == "memory" else _measure_hop
    room = blocks.room_for(2, load.prompt_len) + blocks.nbytes * _SPARE_BLOCKS
    settings = {"kv_transfer_config": setup.choice, "kv_cache_memory_bytes": room}
    place = 0
    async with aclosing(measure(starter, load, cores, settings)) as turns:
        async for timed in turns:
            if not timed.num_found:
                raise OutriderError(f"{setup.name}: the KV of a prompt of {load.prompt_len} tokens was not found")
            if place:
                found.append(timed)
            place += 1
            say(f"TTFT, {setup.name}, {place} of {load.turns['ttft'] + 1} turns")


async def _measure_hop(
    starter: Starter, load: Load, cores: Cores, settings: Mapping[str, Any]
) -> AsyncGenerator[Timed]:
    async with (
        starter.pair(cores.prefill, cores.decode, **settings) as (one, other),
        AsyncClient(other.target, retry=NO_RETRY) as client,
        _node(one) as prefill,
        _node(other) as decode,
    ):
        prompts = _prompts(load, other)[: 2 * (load.turns["ttft"] + 1)]
        for cold, prompt in zip(prompts[::2], prompts[1::2], strict=True):
            recomputed_s, _ = await _ask(client, cold)
            yield Timed(recomputed_s, *await _hop(prefill, decode, prompt))


async def _measure_memory(
    starter: Starter, load: Load, cores: Cores, settings: Mapping[str, Any]
) -> AsyncGenerator[Timed]:
    async with (
        starter.running("memory", cores.decode, **settings) as node,
        AsyncClient(node.target, retry=NO_RETRY) as client,
    ):
        prompts = _prompts(load, node)[: load.turns["ttft"] + 3]
        for prompt in prompts[:2]:
            await _ask(client, prompt)
        for gone, cold in zip(prompts, prompts[2:], strict=False):
            recomputed_s, _ = await _ask(client, cold)
            yield Timed(recomputed_s, *await _ask(client, gone))


def _prompts(load: Load, node: ServerNode) -> list[Prompt]:
    """Two for each turn, and for two that do not count."""
    load.check_lengths(node.info.max_model_len)
    endless = random_prompts(
        input_len=load.prompt_len, output_len=1, prefix_len=0, vocab_size=node.info.vocab_size, seed=load.seed
    )
    return list(islice(endless, 2 * (load.turns["ttft"] + 2)))


@asynccontextmanager
async def _node(server: ServerNode) -> AsyncIterator[Node]:
    node = Node(server.target, HANG_TIMEOUT_S)
    try:
        yield node
    finally:
        await node.close()


async def _ask(client: AsyncClient, prompt: Prompt) -> tuple[float, int]:
    """Returns: seconds until the first token, and how many tokens of the prompt were found."""
    begun_s = _clock()
    first_s = None
    generation = client.generate(token_ids=prompt.token_ids, max_tokens=1, temperature=0.0, ignore_eos=True)
    async with aclosing(generation):
        async for _ in generation:
            first_s = first_s or _clock()
    if first_s is None:
        raise OutriderError("a prompt had no answer")
    return first_s - begun_s, generation.finished[0].usage.cached_tokens


async def _hop(prefill: Node, decode: Node, prompt: Prompt) -> tuple[float, int]:
    """As `_ask`, of the node that goes on, from when it is asked to: its first token is the second of all."""
    assert prompt.token_ids is not None
    request = generate_request(
        None, {"token_ids": prompt.token_ids, "max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    )
    progress = Progress(request)
    for message in await _read(prefill, progress.first_request()):
        progress.take_in(message[1])
    begun_s = _clock()
    messages = await _read(decode, progress.continuation())
    first_s = next((at_s for at_s, message in messages if message.HasField("delta")), None)
    finished = next((message.finished for _, message in messages if message.HasField("finished")), None)
    if first_s is None or finished is None:
        raise OutriderError("a prompt that was handed on had no answer")
    return first_s - begun_s, finished.usage.cached_tokens


async def _read(node: Node, request: pb.GenerateRequest) -> Sequence[tuple[float, pb.GenerateResponse]]:
    """All messages of a call, with when they came."""
    call = node.generate(request, None, ())
    messages = []
    while isinstance(message := await uncancelled(call.read()), pb.GenerateResponse):
        messages.append((_clock(), message))
    return messages
