"""`outrider bench engine`: how fast steps are, in this process and without a front."""

import argparse
import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from clients.workload import random_prompts
from server.commands.bench_environment import describe_host, describe_run
from server.commands.bench_output import add_output, check_output, write_report
from server.commands.bench_settings import add_settings, check_capacity, given_settings, resolve_compiled
from server.commands.flag_types import at_least, integer, list_of
from server.config_sources import ResolvedConfig
from server.host import cpu_count
from server.passing_thread import run_in_passing_thread

if TYPE_CHECKING:
    from server.compose import Core

_LIBRARIES = ("torch", "triton", "transformers")
_COLUMNS = (
    f"{'batch':>5} {'step ms':>9} {'min':>9} {'max':>9} {'tok/s':>9} {'floor ms':>9} {'x floor':>8} {'TTFT ms':>9} "
    f"{'prefill tok/s':>13} {'tok/step':>8}"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what is run and how often, and the settings of model and engine."""
    parser.add_argument(
        "--batch-sizes",
        type=list_of(_batch_size, "SIZE"),
        default=[1, 4, 8, 16],
        metavar="SIZE[,SIZE...]",
        help="sequences that run together, a line of the table each (default: 1,4,8,16)",
    )
    for name, kind, default, metavar, words in (
        ("--input-len", at_least(1), 64, "TOKENS", "of each prompt"),
        ("--output-len", at_least(1), 128, "TOKENS", "generated for each"),
        ("--repeat", at_least(1), 5, "N", "measured rounds of each size"),
        ("--seed", integer, 0, "SEED", "of the prompts' token ids"),
    ):
        parser.add_argument(name, type=kind, default=default, metavar=metavar, help=f"{words} (default: {default})")
    add_output(parser)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Build the engine, measure each batch size, print the table, write the JSON.

    Raises: ConfigError for settings that do not go together; whatever loading the model raises.
    """
    check_output(args.output)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    with given_settings(args) as settings:
        resolved = resolve_compiled(settings)
        from server.compose import build_core  # torch, which a wrong argument can do without

        # Before there is an event loop: that one would keep an interrupt to itself until all is loaded.
        core = build_core(resolved.config)
        report = _begin_report(core, resolved, args)
        asyncio.run(_measure(core, args, report))
    write_report(report, args.output)
    return 0


def _begin_report(core: "Core", resolved: ResolvedConfig, args: argparse.Namespace) -> dict[str, Any]:
    """What is measured, on what, without rows. Raises: ConfigError if it does not fit."""
    import torch

    from server.commands.bench_device import copy_bandwidth, device_name

    info = core.engine.model_info
    check_capacity(
        info,
        resolved.config.scheduler.max_num_seqs,
        flag="--batch-sizes",
        batch=max(args.batch_sizes),
        num_tokens=args.input_len + args.output_len,
        lengths="--input-len + --output-len",
    )
    bandwidth = run_in_passing_thread(partial(copy_bandwidth, info.device), "outrider-copy")
    return {
        **describe_run(_LIBRARIES),
        "host": describe_host(),
        "device": {
            "name": device_name(info.device),
            "threads": cpu_count() if info.device == "cpu" else torch.get_num_threads(),
            "copy_bytes_per_s": bandwidth,
        },
        "load": {name: getattr(args, name) for name in ("batch_sizes", "input_len", "output_len", "repeat", "seed")},
        "settings": resolved.config.flat(),
        "model": {
            "name": info.served_model_name,
            "architecture": info.architecture,
            "dtype": info.dtype,
            "device": info.device,
            "weight_bytes_per_step": core.footprint.weight_nbytes,
            "kv_bytes_per_token": core.footprint.kv_token_nbytes,
        },
        "rows": [],
    }


async def _measure(core: "Core", args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Print a row for each batch size, and add it to the report."""
    from server.commands.bench_engine_rounds import Bench, Row

    prompts = random_prompts(
        input_len=args.input_len,
        output_len=args.output_len,
        prefix_len=0,
        vocab_size=core.engine.model_info.vocab_size,
        seed=args.seed,
    )
    bandwidth = report["device"]["copy_bytes_per_s"]
    try:
        await core.engine.start()
        print("\n".join(_heading(report)), flush=True)
        bench = Bench(core, prompts)
        for batch in args.batch_sizes:
            await bench.measure(batch)  # what is made at first use is not measured
            rounds = [await bench.measure(batch) for _ in range(args.repeat)]
            nbytes = core.footprint.step_nbytes(batch, args.input_len + args.output_len / 2)
            row = Row(batch, args.input_len, rounds, nbytes / bandwidth).report()
            report["rows"].append(row)
            print(_line(row), flush=True)
    finally:
        await core.engine.stop()


def _heading(report: Mapping[str, Any]) -> Iterator[str]:
    model, device, load = report["model"], report["device"], report["load"]
    threads = f", {device['threads']} threads" if model["device"] == "cpu" else ""
    yield f"{model['name']}, {model['architecture']}, {model['dtype']} on {device['name']}{threads}"
    yield (
        f"{load['input_len']} + {load['output_len']} tokens, median of {load['repeat']}; copies run at "
        f"{device['copy_bytes_per_s'] / 1e9:,.1f} GB/s, a step reads {model['weight_bytes_per_step'] / 1e6:,.1f} MB of "
        f"weights and {model['kv_bytes_per_token'] / 1e3:,.1f} kB of KV per token"
    )
    yield _COLUMNS


def _line(row: Mapping[str, Any]) -> str:
    step, ttft = row["step_ms"], row["ttft_ms"]
    cells: Sequence[tuple[float | None, str]] = (
        (step and step["median"], "9.3f"),
        (step and step["min"], "9.3f"),
        (step and step["max"], "9.3f"),
        (row["tokens_per_s"], "9,.1f"),
        (row["floor_ms"], "9.3f"),
        (row["step_per_floor"], "8.2f"),
        (ttft["median"], "9.2f"),
        (row["prefill_tokens_per_s"], "13,.0f"),
        (row["tokens_per_step"], "8.2f"),
    )
    return " ".join((f"{row['batch']:>5}", *(_cell(value, form) for value, form in cells)))


def _cell(value: float | None, form: str) -> str:
    width = form.partition(".")[0].rstrip(",")
    return f"{'-':>{width}}" if value is None else format(value, form)


def _batch_size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(text)
    return int(text)
