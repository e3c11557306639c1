"""How long a decoding step takes on this GPU, and how much of it is the host's.

`python -m tests.gpu.time_step [--shape 8b|135m] [--batches 1,8,64] [--context 512] [--drafts K] [--compile] [--eager]
[--profile] ...`, from the repository root. Weights are random. Times are medians over steps at pipeline depth 1; of
the host's parts the lower quartile stands beside, because machines are shared.
"""

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig

from server.request import Request, SamplingParams
from server.worker.buckets import batch_sizes
from tests.fakes.stepping import Stepping

DEVICE = torch.device("cuda", 0)
SHAPES = {
    "8b": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
    ),
    "135m": LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    ),
}
WARM_UP_STEPS = 20
NUM_PROFILED = 10


class Stopwatch:
    """Times of each part of a step on the host, in microseconds."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def watch(self, name: str, function: Any) -> Callable[..., Any]:
        """The function, timed."""
        times = self.times.setdefault(name, [])

        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            result = function(*args)
            times.append((time.perf_counter() - started) * 1e6)
            return result

        return timed

    def quantile(self, percent: int, *names: str) -> float:
        """Of the sum of these parts, over the steps since the warm-up."""
        sums: list[float] = list(map(sum, zip(*(self.times[name][WARM_UP_STEPS:] for name in names), strict=False)))
        return statistics.quantiles(sums, n=100)[percent - 1]

    def both(self, *names: str) -> str:
        """Median and lower quartile."""
        return f"{self.quantile(50, *names):5.0f} ({self.quantile(25, *names):.0f})"


def measure(
    stepping: Stepping, batch: int, context: int, params: SamplingParams, num_steps: int, *, is_profiled: bool
) -> None:
    """Print the times of a batch size, and the kernels of its step if asked for."""
    prompt = [(7 * i) % 1000 + 3 for i in range(context)]
    for i in range(batch):
        stepping.scheduler.add(Request(request_id=f"{batch}-{i}", prompt_token_ids=(i + 3, *prompt), sampling=params))
    while stepping.scheduler.statistics().num_waiting:
        stepping.step()
    for _ in range(4):
        stepping.step()
    watch, originals = Stopwatch(), (stepping.scheduler.schedule, stepping.scheduler.update, stepping.runner.launch)
    scheduler, runner = stepping.scheduler, stepping.runner
    scheduler.schedule, scheduler.update, runner.launch = (  # type: ignore[method-assign]
        watch.watch(name, function) for name, function in zip(("schedule", "update", "launch"), originals, strict=True)
    )
    settle, replay = runner.settle, runner._replay
    runner._replay = watch.watch("replay", replay)  # type: ignore[method-assign]

    def settled(handle: Any) -> Any:
        handle.flight.results()  # what waits for the device is not the host's work
        return watch.watch("settle", settle)(handle)

    runner.settle = settled  # type: ignore[method-assign]
    step = watch.watch("step", stepping.step)
    for _ in range(num_steps):
        assert step() is not None
    torch.cuda.synchronize()
    scheduler.schedule, scheduler.update, runner.launch = originals  # type: ignore[method-assign]
    runner.settle, runner._replay = settle, replay  # type: ignore[method-assign]
    replaying = f", of it replaying {watch.both('replay')}" if watch.times["replay"] else ""
    print(
        f"batch {batch:3}: step {watch.quantile(50, 'step') / 1e3:7.3f} ms; host {watch.both('launch', 'settle')} us, "
        f"launch {watch.both('launch')}{replaying}, settle {watch.both('settle')}; "
        f"scheduler {watch.both('schedule', 'update')} us{segments(stepping, batch)}",
        flush=True,
    )
    if is_profiled:  # while the step's layout is on the device
        print_kernels(stepping, batch)
    for i in range(batch):
        stepping.scheduler.abort(f"{batch}-{i}")
    while stepping.scheduler.has_requests:
        stepping.step()


def segments(stepping: Stepping, batch: int) -> str:
    """Device times of the captured segments, by replaying them as they stand."""
    graphs, buckets = stepping.runner._graphs, stepping.runner._buckets
    bucket = buckets.fit(batch, buckets.max_query)
    if graphs is None or bucket is None:
        return ""
    times = []
    for replay in (graphs.replay_first, partial(graphs.replay_second, drafts=True)):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
        for event in events:
            event.record()
            replay(bucket)
        torch.cuda.synchronize()
        times.append(statistics.median(a.elapsed_time(b) for a, b in pairwise(events)))
    return f"; device {times[0]:.3f} + {times[1]:.3f} ms"


def print_kernels(stepping: Stepping, batch: int) -> None:
    """What a replayed step spends its time on."""
    graphs, buckets = stepping.runner._graphs, stepping.runner._buckets
    bucket = buckets.fit(batch, buckets.max_query)
    assert graphs is not None
    assert bucket is not None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_PROFILED):
            graphs.replay_first(bucket)
            graphs.replay_second(bucket, drafts=True)
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    for event in events[:25]:
        time_us, count = event.device_time_total / NUM_PROFILED, event.count / NUM_PROFILED
        print(f"  {time_us:8.1f} us {count:6.1f} x {event.key[:110]}", flush=True)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--max-len", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=200, help="per batch, more than 20")
    parser.add_argument("--compile", action="store_true", help="merge linear layers, compile decoder layers")
    parser.add_argument("--eager", action="store_true", help="capture nothing")
    parser.add_argument("--profile", action="store_true", help="print the kernels of the smallest batch's step")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("server.model.traced_layers").setLevel(logging.DEBUG)
    batches = [int(batch) for batch in args.batches.split(",")]
    params = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, max_tokens=args.max_len - args.context - 1, ignore_eos=True
    )
    with tempfile.TemporaryDirectory() as folder:
        SHAPES[args.shape].save_pretrained(folder)
        started = time.perf_counter()
        stepping = Stepping(
            Path(folder),
            DEVICE,
            torch.bfloat16,
            k=args.drafts,
            depth=1,
            max_tokens=args.max_len,
            block_size=32,
            load_format="dummy",
            is_compiled=args.compile,
            max_num_seqs=max(batches),
        )
        torch.cuda.synchronize()
        print(f"{args.shape}: built in {time.perf_counter() - started:.1f} s, compiling included", flush=True)
        if not args.eager:
            before, _ = torch.cuda.mem_get_info()
            started = time.perf_counter()
            stepping.runner.capture(batch_sizes(max(batches)))
            torch.cuda.synchronize()
            nbytes = before - torch.cuda.mem_get_info()[0]
            print(
                f"captured {batch_sizes(max(batches))} in {time.perf_counter() - started:.1f} s, {nbytes >> 20} MiB",
                flush=True,
            )
        for batch in batches:
            is_profiled = args.profile and not args.eager and batch == batches[0]
            measure(stepping, batch, args.context, params, args.steps, is_profiled=is_profiled)


if __name__ == "__main__":
    main()
