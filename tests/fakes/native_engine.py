"""Our engine on the fake executor, and what its streams bring."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from server.engine.detokenize import Decoder
from server.engine.engine import NativeEngine
from server.engine.protocol import Delta, Finished, RequestStream, Started, StreamEvent
from server.engine.speculation_control import SpeculationControl
from server.engine.step_loop import StepLoop
from server.errors import OutriderError
from server.events import Event, EventBus
from server.plan import StepPlan, StepResult
from server.request import Request
from server.speculative_config import SpeculativeConfig
from tests.fakes.core import Clock, make_core, model_info
from tests.fakes.eventually import eventually
from tests.fakes.executor import FakeExecutor, InjectedError


class Letters:
    """Decodes token i as one character."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(ord("A") + token_id) for token_id in token_ids)


LETTERS = Letters()

LONG = 10_000
"""Tokens that take seconds: such a request does not end before the test ends it."""


class ControlledExecutor:
    """Passes steps on; the test may hold them at their settling, and break the next ones."""

    def __init__(self, inner: FakeExecutor) -> None:
        self.inner = inner
        self.num_launch_errors = 0
        self.num_settle_errors = 0
        self.is_settling = threading.Event()
        self.may_settle = threading.Event()
        self.may_settle.set()

    def launch(self, plan: StepPlan) -> Any:
        if self.num_launch_errors:
            self.num_launch_errors -= 1
            raise InjectedError("launch")
        return self.inner.launch(plan)

    def settle(self, handle: Any) -> StepResult:
        self.is_settling.set()
        assert self.may_settle.wait(timeout=30)
        result = self.inner.settle(handle)
        if self.num_settle_errors:
            self.num_settle_errors -= 1
            raise InjectedError("settle")
        return result


@dataclass
class Received:
    """What a stream brought."""

    events: list[StreamEvent] = field(default_factory=list)
    error: OutriderError | None = None

    def text(self, index: int = 0) -> str:
        """The choice's text."""
        return "".join(event.text for event in self.events if isinstance(event, Delta) and event.index == index)

    def token_ids(self, index: int = 0) -> list[int]:
        """The choice's ids."""
        deltas = [event for event in self.events if isinstance(event, Delta) and event.index == index]
        return [token_id for delta in deltas for token_id in delta.token_ids]

    @property
    def finished(self) -> dict[int, Finished]:
        """The end of each choice."""
        ends = [event for event in self.events if isinstance(event, Finished)]
        by_index = {event.index: event for event in ends}
        assert len(by_index) == len(ends), "a choice has ended twice"
        return by_index


async def first_event(stream: RequestStream) -> StreamEvent:
    """Wait for it."""
    async for event in stream:
        return event
    raise AssertionError("no event")


async def receive(stream: RequestStream) -> Received:
    """Read a stream to its end or error."""
    received = Received()
    try:
        async for event in stream:
            received.events.append(event)
    except OutriderError as error:
        received.error = error
    assert not any(isinstance(event, Started) for event in received.events[1:])
    return received


@dataclass
class Harness:
    """An engine and its parts."""

    engine: NativeEngine
    steps: StepLoop
    executor: ControlledExecutor
    clock: Clock
    events: list[Event]

    def submit(self, request: Request) -> RequestStream:
        """Open and submit at once."""
        stream = self.engine.open(request.request_id, deadline_s=request.deadline_s)
        self.engine.submit(stream, request)
        return stream

    async def generate(self, request: Request) -> Received:
        """Submit and read to the end."""
        return await receive(self.submit(request))

    async def all_blocks_are_free(self) -> None:
        """Wait until every request has left the scheduler."""

        def is_idle() -> bool:
            statistics = self.engine.statistics()
            return statistics.kv_blocks_free == statistics.kv_blocks_total and not statistics.num_waiting

        await eventually(is_idle)


def make_harness(
    *,
    depth: int = 0,
    max_queued_requests: int = 100,
    decoder: Decoder = LETTERS,
    warm_up: Callable[[], None] = lambda: None,
    blocked_clock: Callable[[], float] = lambda: 0.0,
    block_size: int = 4,
    num_blocks: int = 8192,
    max_drafts: int = 0,
    stream_patience_s: float = 0.0,
    on_stopped: Callable[[], None] = lambda: None,
    speculative: SpeculativeConfig | None = None,
    **config: Any,
) -> Harness:
    """An engine that is not started; `config` are SchedulerConfig fields.

    Args: speculative: what may be changed; the drafts are the fake executor's own.
    """
    core = make_core(block_size=block_size, num_blocks=num_blocks, max_drafts=max_drafts, **config)
    executor = ControlledExecutor(core.executor)
    events: list[Event] = []
    bus = EventBus()
    bus.subscribe(events.append)
    steps = StepLoop(
        core.scheduler,
        executor,
        bus,
        pipeline_depth=depth,
        stream_patience_s=stream_patience_s,
        warm_up=warm_up,
        clock=core.clock,
        make_blocked_clock=lambda: blocked_clock,
    )
    engine = NativeEngine(
        steps,
        decoder,
        model_info(block_size=block_size, num_blocks=num_blocks, max_drafts=max_drafts),
        SpeculationControl(
            speculative, [object()] * len(speculative.proposers) if speculative else [], core.scheduler.drafts
        ),
        max_queued_requests=max_queued_requests,
        max_num_seqs=core.max_num_seqs,
        on_stopped=on_stopped,
        clock=core.clock,
    )
    return Harness(engine, steps, executor, core.clock, events)


@asynccontextmanager
async def running_engine(**settings: Any) -> AsyncIterator[Harness]:
    """A started engine; at the end it must not have asked anything impossible of the device."""
    harness = make_harness(**settings)
    await harness.engine.start()
    try:
        yield harness
    finally:
        harness.executor.may_settle.set()
        await harness.engine.stop()
    assert harness.executor.inner.violations == []
