"""How long the host's part of a decoding step takes apart from the worker's: planning, taking in, handing on.

`python -m tests.bench.time_scheduler [--rows 1,8,64] [--drafts K] [--tokenizer FOLDER]`, from the repository root.
Nothing is computed: the executor answers at once. Times are medians over steps, of a process that has one thread.
"""

import argparse
import asyncio
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from server.commands.bench_environment import describe_host, describe_run
from server.config import SchedulerConfig
from server.engine.detokenize import Decoder
from server.engine.engine import NativeEngine
from server.engine.live_request import LiveRequest
from server.engine.protocol import RequestStream
from server.engine.speculation_control import SpeculationControl
from server.engine.step_loop import StepLoop
from server.events import EventBus
from server.kv.block_pool import BlockPool
from server.plan import RowResult, StepPlan, StepResult
from server.request import Request, SamplingParams
from server.scheduler.outputs import SequenceOutput
from server.scheduler.scheduler import Scheduler
from tests.fakes.core import model_info

NUM_STEPS = 1000
NUM_WARM_UP_STEPS = 50
PROMPT_LEN = 64
BLOCK_SIZE = 32


class InstantExecutor:
    """Accepts every draft, and yields the ids 1000 to 1999 in turn."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._num_launched = 0

    def launch(self, plan: StepPlan) -> StepResult:
        """The results of the step."""
        self._num_launched += 1
        return StepResult(tuple(self._run(row.seq_id, row.epoch, row.num_drafts) for row in plan.rows))

    def settle(self, handle: StepResult) -> StepResult:
        """They are there already."""
        return handle

    def _run(self, seq_id: int, epoch: int, num_drafts: int) -> RowResult:
        first = self._num_launched * 7 + seq_id * 101
        token_ids = tuple(1000 + (first + i) % 1000 for i in range(1 + num_drafts))
        return RowResult(seq_id, epoch, token_ids, num_drafts, self._num_drafts)


class Letters:
    """A decoder that costs nothing."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """One character per token."""
        return "x" * len(token_ids)


class Stopwatch:
    """Microseconds that each part of the steps took."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}

    def measure(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """The function's result."""
        started = time.perf_counter()
        result = function(*args)
        self.add(name, time.perf_counter() - started)
        return result

    def add(self, name: str, seconds: float) -> None:
        """One more step's time."""
        self._times.setdefault(name, []).append(seconds * 1e6)

    def medians(self) -> dict[str, float]:
        """By part, without the steps to warm up."""
        return {name: statistics.median(times[NUM_WARM_UP_STEPS:]) for name, times in self._times.items()}


async def time_steps(num_rows: int, depth: int, num_drafts: int, decoder: Decoder) -> dict[str, float]:
    """Decode `num_rows` sequences, each read by a task. Returns: median microseconds per step of each part.

    schedule and update are the scheduler's, outputs is what else the step thread does with it, deliver is the event
    loop's: from the outputs until every reader has its tokens.
    """
    num_steps = NUM_WARM_UP_STEPS + NUM_STEPS + depth
    num_tokens = (num_steps + 2) * (1 + num_drafts)
    num_blocks = num_rows * (2 + (PROMPT_LEN + num_tokens) // BLOCK_SIZE)
    info = model_info(block_size=BLOCK_SIZE, num_blocks=num_blocks, max_drafts=num_drafts)
    config = SchedulerConfig(
        max_num_seqs=num_rows, max_num_batched_tokens=num_rows * (PROMPT_LEN + BLOCK_SIZE + num_drafts)
    )
    pool = BlockPool(num_blocks + 1)
    scheduler = Scheduler(config, info, pool, enable_prefix_caching=True, clock=time.monotonic)
    executor = InstantExecutor(num_drafts)
    engine = NativeEngine(
        StepLoop(scheduler, executor, EventBus(), pipeline_depth=depth),
        decoder,
        info,
        SpeculationControl(None, (), scheduler.drafts),
        max_queued_requests=num_rows,
        max_num_seqs=num_rows,
    )
    readers = []
    for i in range(num_rows):
        request = Request(
            request_id=str(i),
            prompt_token_ids=tuple(range(i, i + PROMPT_LEN + i % BLOCK_SIZE)),  # not all fill a block in the same step
            sampling=SamplingParams(max_tokens=num_tokens),
            stop_token_ids=frozenset((0, 2)),
            deadline_s=time.monotonic() + 3600,
        )
        # Its own thread never starts, so that the parts can be told apart.
        live = engine._live[request.request_id] = LiveRequest(request.request_id)
        live.submit(request, engine._decoder)
        scheduler.add(request)
        readers.append(asyncio.create_task(read(live.mailbox)))
    watch = Stopwatch()
    launched = []
    for _ in range(num_steps):
        plan = watch.measure("schedule", scheduler.schedule)
        launched.append(executor.launch(plan))
        if len(launched) > depth:
            watch.measure("update", scheduler.update, executor.settle(launched.pop(0)))
        outputs = watch.measure("outputs", take_outputs, scheduler)
        started = time.perf_counter()
        engine._deliver(outputs)
        await asyncio.sleep(0)
        watch.add("deliver", time.perf_counter() - started)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return watch.medians()


def take_outputs(scheduler: Scheduler) -> list[SequenceOutput]:
    """What the step thread does between a step and the next one."""
    scheduler.statistics()
    return scheduler.take_outputs()


async def read(stream: RequestStream) -> None:
    """What a call does, without gRPC."""
    async for _ in stream:
        pass


def main() -> None:
    """Print a line per number of rows and depth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,64", help="decoding sequences")
    parser.add_argument("--drafts", type=int, default=0, help="drafts of each row, all of which are accepted")
    parser.add_argument("--tokenizer", help="folder of the tokenizer that decodes; by default that costs nothing")
    arguments = parser.parse_args()
    decoder: Decoder = Letters()
    if arguments.tokenizer:
        from transformers import AutoTokenizer

        decoder = AutoTokenizer.from_pretrained(arguments.tokenizer)
    print(json.dumps({**describe_run(("transformers",)), **describe_host()}))
    gc.freeze()  # as the server does once it has loaded
    for depth in (0, 1):
        for num_rows in map(int, arguments.rows.split(",")):
            parts = asyncio.run(time_steps(num_rows, depth, arguments.drafts, decoder))
            columns = "".join(f"{name} {parts[name]:8.1f}   " for name in ("schedule", "update", "outputs", "deliver"))
            both = parts["schedule"] + parts["update"]
            print(f"depth {depth} rows {num_rows:3}   {columns} schedule + update {both:8.1f} us")


if __name__ == "__main__":
    main()
