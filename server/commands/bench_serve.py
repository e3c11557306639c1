"""`outrider bench serve`: load on a running server, over gRPC."""

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from clients.aio import AsyncClient
from clients.bench import BenchResult, Load, run_load
from clients.measurements import Goodput
from clients.retry import RetryPolicy
from clients.workload import Prompt, WorkloadError, random_prompts, read_prompts
from protos.outrider.v1 import inference_pb2 as pb
from server.commands.bench_environment import describe_environment
from server.commands.bench_output import add_output, check_output, write_report
from server.commands.bench_text import render
from server.commands.call_errors import one_line_errors
from server.commands.flag_types import at_least, integer, number, seconds, target
from server.commands.generation_flags import DEFAULT_TARGET
from server.errors import ConfigError

_EXIT_NOTHING_COMPLETED = 1
_CONNECT_TIMEOUT_S = 30.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what is sent, how, and where the result goes."""
    parser.add_argument(
        "--target",
        type=target,
        default=DEFAULT_TARGET,
        metavar="HOST:PORT",
        help="server; unix:PATH too (default: %(default)s)",
    )
    add_output(parser)

    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="one prompt per line, or .jsonl with prompt or prompt_token_ids, and max_tokens; random ids if not given",
    )
    prompts.add_argument(
        "--num-prompts", type=at_least(1), default=100, metavar="N", help="measured requests (default: %(default)s)"
    )
    prompts.add_argument(
        "--num-warmups",
        type=at_least(0),
        default=1,
        metavar="N",
        help="requests sent before them (default: %(default)s)",
    )
    prompts.add_argument(
        "--random-input-len",
        type=at_least(1),
        default=128,
        metavar="TOKENS",
        help="random ids each (default: %(default)s)",
    )
    prompts.add_argument(
        "--random-output-len",
        type=at_least(1),
        default=128,
        metavar="TOKENS",
        help="tokens to generate, also for a dataset's lines without max_tokens (default: %(default)s)",
    )
    prompts.add_argument(
        "--prefix-len",
        type=at_least(0),
        default=0,
        metavar="TOKENS",
        help="ids that all random prompts share, before (default: %(default)s)",
    )
    prompts.add_argument("--temperature", type=number, default=0.0, help="0 is greedy (default: %(default)s)")
    prompts.add_argument("--ignore-eos", action="store_true", help="always generate as many tokens as asked for")
    prompts.add_argument(
        "--seed", type=integer, default=0, help="of random prompts and arrival times (default: %(default)s)"
    )

    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate",
        type=_positive,
        default=math.inf,
        metavar="PER_S",
        help="open loop: mean rate of Poisson arrivals; inf (the default) sends all at once",
    )
    load.add_argument(
        "--max-concurrency",
        type=at_least(1),
        metavar="N",
        help="most calls at a time; closed loop, unless a rate is given: then the wait for a turn counts as latency",
    )
    load.add_argument("--timeout", type=seconds, metavar="SECONDS", help="deadline of each call; none if not given")
    load.add_argument(
        "--goodput", type=_goodput, metavar="ttft_ms:MS,tpot_ms:MS", help="count the requests that meet both"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print the report, write the JSON. Returns: 1 if not one request completed.

    Raises: ConfigError for prompts the model cannot take; OutriderError if the server cannot be reached.
    """
    check_output(args.output)
    try:
        with one_line_errors(args.target):
            result, model = asyncio.run(_measure(args))
    except ExceptionGroup as group:
        unreadable, rest = group.split(WorkloadError)
        if unreadable is None or rest is not None:
            raise
        raise ConfigError(str(unreadable.exceptions[0])) from group
    report = {**describe_environment(model), "load": _load_report(args), **result.report()}
    print(render(result), flush=True)
    write_report(report, args.output)
    return 0 if result.measurements.num_completed else _EXIT_NOTHING_COMPLETED


async def _measure(args: argparse.Namespace) -> tuple[BenchResult, pb.GetModelInfoResponse]:
    # A retry would hide a refusal, and its pause would be measured as the server's.
    async with AsyncClient(args.target, retry=RetryPolicy(max_attempts=1)) as client:
        model = await client.model_info(timeout_s=_CONNECT_TIMEOUT_S)
        load = Load(
            num_prompts=args.num_prompts,
            request_rate=args.request_rate,
            max_concurrency=args.max_concurrency,
            num_warmups=args.num_warmups,
            temperature=args.temperature,
            ignore_eos=args.ignore_eos,
            seed=args.seed,
            timeout_s=args.timeout,
            goodput=args.goodput,
        )
        with _progress(args.num_prompts) as advance:
            return await run_load(client, _prompts(args, model), load, advance), model


def _prompts(args: argparse.Namespace, model: pb.GetModelInfoResponse) -> Iterator[Prompt]:
    if args.dataset is not None:
        return read_prompts(args.dataset, output_len=args.random_output_len)
    num_tokens = args.prefix_len + args.random_input_len + args.random_output_len
    if num_tokens > model.max_model_len:
        raise ConfigError(
            f"--prefix-len + --random-input-len + --random-output-len is {num_tokens} tokens, "
            f"and {model.served_model_name} takes {model.max_model_len}"
        )
    return random_prompts(
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        prefix_len=args.prefix_len,
        vocab_size=model.vocab_size,
        seed=args.seed,
    )


def _load_report(args: argparse.Namespace) -> dict[str, object]:
    """Every flag as it was used; an infinite rate is null, which JSON can say."""
    names = sorted(name for name in vars(args) if name not in ("output", "goodput", "bench"))
    values = {name: getattr(args, name) for name in names}
    values["dataset"] = None if args.dataset is None else str(args.dataset)
    values["request_rate"] = None if math.isinf(args.request_rate) else args.request_rate
    return values


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("requests"),
        *Progress.get_default_columns()[1:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _goodput(text: str) -> Goodput:
    try:
        goals = {name: _positive(value) for name, _, value in (item.partition(":") for item in text.split(","))}
        return Goodput(ttft_s=goals.pop("ttft_ms") / 1e3, tpot_s=goals.pop("tpot_ms") / 1e3)
    except (KeyError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(f"must be like ttft_ms:500,tpot_ms:50, got {text!r}") from error
