"""`outrider bench disaggregated`: whether two nodes that share the work pay, and what moving KV costs."""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from server.commands.bench_disaggregated_connectors import Setup, chosen_connectors, set_up
from server.commands.bench_disaggregated_cores import Cores, divide_cores
from server.commands.bench_disaggregated_frontier import check_budgets, measure_frontier
from server.commands.bench_disaggregated_load import CONNECTORS, PARTS, REPEATS, Load
from server.commands.bench_disaggregated_node import Starter
from server.commands.bench_disaggregated_process import on_cores
from server.commands.bench_disaggregated_report import (
    TRANSFER_HEADING,
    TTFT_HEADING,
    frontier_lines,
    frontier_report,
    transfer_lines,
    transfer_report,
    ttft_line,
    ttft_report,
    verdicts_of,
)
from server.commands.bench_disaggregated_transfer import measure_transfer
from server.commands.bench_disaggregated_ttft import measure_ttft
from server.commands.bench_disaggregated_verdict import GOALS, verdict_lines
from server.commands.bench_environment import describe_host, describe_run
from server.commands.bench_output import add_output, check_output, write_report
from server.commands.bench_settings import add_settings, given_settings, resolve_compiled
from server.commands.call_errors import one_line_errors
from server.commands.flag_types import at_least, list_of, one_of, per_second, seconds
from server.config_sources import ResolvedConfig
from server.errors import ConfigError
from server.kv_transfer_config import KV_TRANSFER_CONFIG

_LIBRARIES = ("torch", "transformers", "grpcio", "xxhash", "lmcache", "nixl")
_OURS = ("max_num_batched_tokens", KV_TRANSFER_CONFIG)
"""Settings that are what is measured."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what is run and how often, and the settings of the servers."""
    for name, parse, default, metavar, words in (
        ("--parts", list_of(one_of(PARTS), "PART"), ",".join(PARTS), f"{{{','.join(PARTS)}}}[,...]", _PARTS_HELP),
        ("--budgets", list_of(at_least(1), "N"), "32,64,128,256,512", "N[,N...]", "max-num-batched-tokens of one node"),
        ("--rates", list_of(per_second, "PER_S"), "0.25", "PER_S[,...]", "long prompts per second on average"),
        ("--burst-size", at_least(1), "2", "N", "long prompts that come at once"),
        ("--prompt-len", at_least(1), "2000", "TOKENS", "of each long prompt"),
        ("--output-len", at_least(2), "16", "TOKENS", "generated for each"),
        ("--stream-rate", per_second, "1", "PER_S", "short requests per second, whose tokens' gaps are measured"),
        ("--stream-input-len", at_least(1), "32", "TOKENS", "of each"),
        ("--stream-output-len", at_least(3), "128", "TOKENS", "generated for each"),
        ("--duration", seconds, "60", "SECONDS", "in which requests are sent, for each rate, set-up and turn"),
        ("--hop-connector", one_of(CONNECTORS[:-1]), "tcp", "CONNECTOR", "between the two nodes of the frontier"),
        ("--block-kib", list_of(at_least(1), "KIB"), "64,1024", "KIB[,KIB...]", "sizes of blocks in transfers"),
        ("--mib", at_least(1), "256", "MIB", "moved in each pass of a transfer"),
        ("--start-timeout", seconds, "600", "SECONDS", "that a server may take to start"),
        ("--seed", at_least(0), "0", "SEED", "of prompts and times"),
    ):
        parser.add_argument(name, type=parse, default=default, metavar=metavar, help=f"{words} (default: {default})")
    parser.add_argument(
        "--repeat",
        type=at_least(1),
        metavar="N",
        help="measured turns of each part "
        f"(default: {', '.join(f'{count} of {part}' for part, count in REPEATS.items())})",
    )
    parser.add_argument(
        "--connectors",
        type=list_of(one_of(CONNECTORS), "CONNECTOR"),
        metavar=f"{{{','.join(CONNECTORS)}}}[,...]",
        help="of the parts ttft and transfer (default: all that are installed)",
    )
    parser.add_argument(
        "--cores",
        type=list_of(at_least(0), "CORE"),
        default=[],
        metavar="CORE[,CORE...]",
        help="of the servers; this process takes the others, or shares them if there are none (default: all)",
    )
    parser.add_argument(
        "--prefill-cores", type=at_least(1), metavar="N", help="how many of them the prefill node has (default: half)"
    )
    parser.add_argument(
        "--storage",
        type=Path,
        metavar="FOLDER",
        help="where the filesystem connector is to keep its blocks (default: a temporary folder)",
    )
    add_output(parser)
    add_settings(parser)


_PARTS_HELP = (
    "frontier: two nodes against one with each token budget; ttft: KV found against recomputed; "
    "transfer: GB/s and processor time of each connector"
)


def run(args: argparse.Namespace) -> int:
    """Start the servers of each part, measure, print tables; write the JSON.

    Raises: ConfigError for settings that do not go together; OutriderError if a server does not start or answer.
    """
    check_output(args.output)
    if args.storage is not None and not args.storage.is_dir():
        raise ConfigError(f"--storage: there is no folder {args.storage}")
    load = Load.of(args)
    cores = divide_cores(args.cores, args.prefill_cores)
    connectors = chosen_connectors(args.connectors)
    with ExitStack() as stack:
        settings = stack.enter_context(given_settings(args))
        resolved = _resolved(settings, load)
        max_num_seqs = resolved.config.scheduler.max_num_seqs
        if "frontier" in args.parts:
            chosen_connectors([load.hop_connector])
            check_budgets(load, max_num_seqs)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-")))
        starter = Starter({**settings, "max_num_seqs": max_num_seqs}, folder, args.start_timeout)
        bench = _Bench(starter, load, cores, folder, args.storage or folder)
        report: dict[str, Any] = {
            **describe_run(_LIBRARIES),
            "host": describe_host(),
            "cores": {**asdict(cores), "is_client_apart": cores.is_client_apart},
            "load": asdict(load),
            "settings": resolved.config.flat(),
            "goals": GOALS,
        }
        stack.enter_context(on_cores(cores.client))
        if not cores.is_client_apart:
            _say("this client shares the servers' cores, with both set-ups")
        stack.enter_context(one_line_errors("bench disaggregated"))
        if "frontier" in args.parts:
            report["frontier"] = bench.frontier()
        if "ttft" in args.parts:
            report["ttft"] = bench.ttft(connectors)
        if "transfer" in args.parts:
            report["transfer"] = bench.transfer(connectors)
    write_report(report, args.output)
    return 0


def _resolved(settings: Mapping[str, object], load: Load) -> ResolvedConfig:
    """What the servers have in common. Raises: ConfigError for what is measured."""
    resolved = resolve_compiled({**settings})
    if taken := [name for name in _OURS if resolved.sources[name] != "default"]:
        raise ConfigError(f"{taken[0]}: is what is measured; see --budgets, --connectors and --hop-connector")
    if resolved.sources["max_num_seqs"] != "default":
        return resolved
    # More than the smallest budget would be refused.
    max_num_seqs = min(resolved.config.scheduler.max_num_seqs, *load.budgets)
    return resolve_compiled({**settings, "max_num_seqs": max_num_seqs})


class _Bench:
    """The parts; each prints its table as it goes."""

    def __init__(self, starter: Starter, load: Load, cores: Cores, folder: Path, storage: Path) -> None:
        self._starter = starter
        self._load = load
        self._cores = cores
        self._folder = folder
        self._storage = storage

    def frontier(self) -> dict[str, Any]:
        load = self._load
        with self._set_up(load.hop_connector) as setup:
            results = asyncio.run(measure_frontier(self._starter, load, self._cores, setup, _say))
        for rate, found in results.items():
            print("\n".join(frontier_lines(rate, found)), end="\n\n", flush=True)
        print("\n".join(verdict_lines(verdicts_of(results))), end="\n\n", flush=True)
        return frontier_report(results)

    def ttft(self, connectors: Sequence[str]) -> list[dict[str, Any]]:
        cells = []
        print(TTFT_HEADING, flush=True)
        for name in connectors:
            _say(f"TTFT, {name}")
            with self._set_up(name) as setup:
                timed = asyncio.run(measure_ttft(self._starter, self._load, self._cores, setup))
            cells.append(ttft_report(name, timed))
            print(ttft_line(cells[-1]), flush=True)
        print(flush=True)
        return cells

    def transfer(self, connectors: Sequence[str]) -> list[dict[str, Any]]:
        cells = []
        print(TRANSFER_HEADING, flush=True)
        for name in connectors:
            for block_kib in self._load.block_kib:
                _say(f"transfer, {name}, blocks of {block_kib} KiB")
                with self._set_up(name) as setup:
                    timings = measure_transfer(self._load, self._cores, setup, block_kib, self._folder)
                cells.append(transfer_report(name, block_kib, timings))
                print("\n".join(transfer_lines(cells[-1])), flush=True)
        return cells

    def _set_up(self, name: str) -> AbstractContextManager[Setup]:
        return set_up(name, self._folder, self._storage, self._cores.both)


def _say(what: str) -> None:
    """What is measured next, on stderr."""
    print(what, file=sys.stderr, flush=True)
