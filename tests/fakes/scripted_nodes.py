"""Prefill and decode nodes that follow a script, and a client over them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from clients.disaggregated import DisaggregatedClient
from clients.retry import RetryPolicy
from server.engine import protocol
from server.engine.protocol import FinishReason, SpeculationStats, StreamEvent, Timing
from server.kv_handle import ChoiceState, KVHandle
from server.request import Request
from server.tokenizer import Tokenizer
from tests.fakes.front import Front, running_front, tiny_model_info
from tests.fakes.gate import Gate
from tests.fakes.hop import PATIENCE_S
from tests.fakes.relay import Relay
from tests.fakes.scripted_engine import Script, ScriptedEngine

QUICK = RetryPolicy(max_attempts=3, initial_backoff_s=0.01)
PROMPT = list(range(10, 30))
SOURCE = KVHandle("tcp", "engine", "127.0.0.1:7000", "lease", 16, (4,), 16, "ab")
TIMING = Timing(queue_s=0.25, prefill_s=0.5, decode_s=0.125, ttft_s=0.75, total_s=1.0)


def end(request: Request, index: int, num_tokens: int, reason: FinishReason, **more: object) -> protocol.Finished:
    """The end of a choice of which each node says that 3 tokens of the prompt, or 16, were cached."""
    num_cached = 3 if request.hands_on else 16
    counts = len(request.prompt_token_ids), num_tokens, num_cached
    return protocol.Finished(index, reason, None, *counts, TIMING, SpeculationStats(), **more)  # type: ignore[arg-type]


async def sharing(request: Request) -> AsyncIterator[StreamEvent]:
    """Repeat the prompt, as far as a node is to: the first token, what follows the first ones, or all of it."""
    prompt, max_tokens = request.prompt_token_ids, request.sampling.max_tokens
    assert max_tokens is not None
    yield protocol.Started(request.request_id, len(prompt), 0, prompt if request.hands_on else ())
    for index in range(request.sampling.n):
        begun = 0
        if request.continuation is not None:
            state = request.continuation.choices[index]
            if state is None:
                continue
            begun = state.num_delivered_tokens
        last = 1 if request.hands_on else max_tokens
        for position in range(begun, last):
            yield protocol.Delta(index, f"<{prompt[position]}>", (prompt[position],))
            await asyncio.sleep(0)
        if last == max_tokens:
            yield end(request, index, last, FinishReason.LENGTH)
        else:
            state = ChoiceState((prompt[0],), 40 + index, 1)
            source = SOURCE if index == 0 else None
            yield end(request, index, 1, FinishReason.HANDED_ON, handed_on=state, source=source)


async def holding_back(request: Request) -> AsyncIterator[StreamEvent]:
    """Hand on with a first token whose text is not certain yet."""
    prompt = request.prompt_token_ids
    yield protocol.Started(request.request_id, len(prompt), 0, prompt)
    state = ChoiceState((prompt[0],), 40, 0)
    yield end(request, 0, 1, FinishReason.HANDED_ON, handed_on=state, source=SOURCE)


class FailsAfter:
    """Shares the work, but the first calls fail behind so many events."""

    def __init__(self, error: Exception, num_events: int, num_calls: int = 1000) -> None:
        self.error, self.num_events, self.num_calls = error, num_events, num_calls

    async def __call__(self, request: Request) -> AsyncIterator[StreamEvent]:
        self.num_calls -= 1
        num_left = self.num_events
        async for event in sharing(request):
            if self.num_calls >= 0 and num_left == 0:
                raise self.error
            num_left -= 1
            yield event


async def stopping_short(request: Request) -> AsyncIterator[StreamEvent]:
    """Share the work, but never end by itself."""
    async for event in sharing(request):
        if isinstance(event, protocol.Finished):
            await asyncio.Event().wait()
        yield event


async def never_beginning(request: Request) -> AsyncIterator[StreamEvent]:
    """Compute for ever."""
    await asyncio.Event().wait()
    yield protocol.Started(request.request_id, 0, 0, ())


class FirstStops:
    """Shares the work, but its first call stops with tokens left to do: with none left, nobody could go on."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def __call__(self, request: Request) -> AsyncIterator[StreamEvent]:
        self.num_calls += 1
        num_left = 3 if self.num_calls == 1 else 1000
        async for event in sharing(request):
            if num_left == 0:
                await asyncio.Event().wait()
            num_left -= 1
            yield event


@dataclass
class Nodes:
    """Prefill and decode nodes, and a client of them."""

    client: DisaggregatedClient
    prefill: list[ScriptedEngine] = field(default_factory=list)
    decode: list[ScriptedEngine] = field(default_factory=list)
    fronts: list[Front] = field(default_factory=list)

    @property
    def begun(self) -> list[Request]:
        """What prefill nodes were asked."""
        return [request for engine in self.prefill for request in engine.submitted]

    @property
    def gone_on(self) -> list[Request]:
        """What decode nodes were asked."""
        return [request for engine in self.decode for request in engine.submitted]


@asynccontextmanager
async def running_nodes(
    tokenizer: Tokenizer,
    prefill: list[Script],
    decode: list[Script],
    *,
    lost: int = 0,
    min_prompt_tokens: int = 8,
) -> AsyncIterator[Nodes]:
    """Serve until the block ends. Args: lost: addresses of prefill nodes, before the others, where nobody answers."""
    engines = [ScriptedEngine(tiny_model_info(), script) for script in (*prefill, *decode)]
    async with AsyncExitStack() as stack:
        fronts = []
        for i, engine in enumerate(engines):
            role = "prefill" if i < len(prefill) else "decode"
            fronts.append(await stack.enter_async_context(running_front(engine, tokenizer, role=role)))
        targets = [front.target for front in fronts]
        client = DisaggregatedClient(
            prefill=[*(f"127.0.0.1:{port}" for port in range(1, 1 + lost)), *targets[: len(prefill)]],
            decode=targets[len(prefill) :],
            min_prompt_tokens=min_prompt_tokens,
            retry=QUICK,
            hang_timeout_s=PATIENCE_S,
        )
        await stack.enter_async_context(client)
        yield Nodes(client, engines[: len(prefill)], engines[len(prefill) :], fronts)


@asynccontextmanager
async def behind_gates(nodes: Nodes) -> AsyncIterator[tuple[DisaggregatedClient, dict[str, Gate]]]:
    """A client that reaches the nodes through gates, and these by target, those of prefill nodes first."""
    async with AsyncExitStack() as stack:
        gates: dict[str, Gate] = {}
        for front in nodes.fronts:
            gate = Gate()
            relay = Relay(front.target, gate)
            stack.callback(relay.close)
            stack.callback(gate.open, loses=True)
            gates[relay.address] = gate
        targets, num_prefill = list(gates), len(nodes.prefill)
        client = DisaggregatedClient(
            prefill=targets[:num_prefill],
            decode=targets[num_prefill:],
            min_prompt_tokens=8,
            retry=QUICK,
            hang_timeout_s=6.0,  # a healthy node of a busy machine answers within half of it
        )
        await stack.enter_async_context(client)
        yield client, gates


def expected(num_tokens: int) -> str:
    return "".join(f"<{token_id}>" for token_id in PROMPT[:num_tokens])
