"""`outrider bench disaggregated`: whether two nodes that share the work pay, and what moving KV costs."""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from server.commands.bench_disaggregated_arguments import add_arguments, fill_in
from server.commands.bench_disaggregated_connectors import Setup, chosen_connectors, set_up
from server.commands.bench_disaggregated_cores import Cores, divide_cores
from server.commands.bench_disaggregated_frontier import Results, check_budgets, measure_frontier, no_results
from server.commands.bench_disaggregated_load import Load
from server.commands.bench_disaggregated_node import BlockShape, Starter
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
from server.commands.bench_disaggregated_transfer import Timings, measure_transfer
from server.commands.bench_disaggregated_ttft import Timed, measure_ttft
from server.commands.bench_disaggregated_verdict import GOALS, verdict_lines
from server.commands.bench_environment import describe_host, describe_run
from server.commands.bench_output import check_output, write_report
from server.commands.bench_settings import given_settings, resolve_compiled
from server.commands.call_errors import one_line_errors
from server.config_sources import ResolvedConfig
from server.errors import ConfigError, OutriderError
from server.kv_transfer_config import KV_TRANSFER_CONFIG

_LIBRARIES = ("torch", "transformers", "grpcio", "xxhash", "lmcache", "nixl")
_OURS: Mapping[str, str] = {
    "max_num_batched_tokens": "--budgets",
    KV_TRANSFER_CONFIG: "--connectors and --hop-connector",
    "kv_cache_memory_bytes": "--prompt-len and --burst-size, which it follows from",
}
"""Settings that are what is measured, or follow from it, and what to give in their place."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what is run and how often, and the settings of the servers."""
    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Start the servers of each part, measure, print tables; write the JSON.

    What is interrupted, or fails, prints and writes what it has. A connector that fails is left out of what is measured
    of each, and the exit code is 1.

    Raises: ConfigError for settings that do not go together; OutriderError if a server does not start or answer.
    """
    fill_in(args)
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
        report: dict[str, Any] = {
            **describe_run(_LIBRARIES),
            "host": describe_host(),
            "cores": {**asdict(cores), "is_client_apart": cores.is_client_apart},
            "load": asdict(load),
            "settings": resolved.config.flat(),
            "goals": GOALS,
            "is_complete": False,
        }
        stack.enter_context(on_cores(cores.client))
        if not cores.is_client_apart:
            print("this client shares the servers' cores, with both set-ups", file=sys.stderr)
        stack.enter_context(one_line_errors("bench disaggregated"))
        bench = _Bench(starter, load, cores, folder, args.storage or folder, report)
        try:
            if "frontier" in args.parts:
                bench.frontier()
            if "ttft" in args.parts:
                bench.ttft(connectors)
            if "transfer" in args.parts:
                bench.transfer(connectors)
            report["is_complete"] = not bench.failures
        finally:
            write_report(report, args.output)
    return 1 if bench.failures else 0


def _resolved(settings: Mapping[str, object], load: Load) -> ResolvedConfig:
    """What the servers have in common. Raises: ConfigError for what is measured."""
    resolved = resolve_compiled({**settings})
    if taken := [name for name in _OURS if resolved.sources[name] != "default"]:
        raise ConfigError(f"{taken[0]}: is what is measured; give {_OURS[taken[0]]}")
    if resolved.sources["max_num_seqs"] != "default":
        return resolved
    # More than the smallest budget would be refused.
    max_num_seqs = min(resolved.config.scheduler.max_num_seqs, *load.budgets)
    return resolve_compiled({**settings, "max_num_seqs": max_num_seqs})


class _Bench:
    """The parts; each prints its table as it goes, and what it has if it ends early."""

    def __init__(
        self, starter: Starter, load: Load, cores: Cores, folder: Path, storage: Path, report: dict[str, Any]
    ) -> None:
        """Args: report: each part adds what it has measured under its name, and all of them what has failed."""
        self.failures: list[str] = report.setdefault("failures", [])
        self._starter = starter
        self._load = load
        self._cores = cores
        self._folder = folder
        self._storage = storage
        self._report = report
        self._begun_s = time.monotonic()

    def frontier(self) -> None:
        load = self._load
        results = no_results(load)
        try:
            with self._set_up(load.hop_connector) as setup:
                asyncio.run(measure_frontier(self._starter, load, self._cores, setup, self._blocks, self._say, results))
        finally:
            self._tell_frontier(results)

    def _tell_frontier(self, results: Results) -> None:
        for rate, found in results.items():
            if any(found.values()):
                print("\n".join(frontier_lines(rate, found)), end="\n\n", flush=True)
        if verdicts := verdicts_of(results):
            print("\n".join(verdict_lines(verdicts)), end="\n\n", flush=True)
        self._report["frontier"] = frontier_report(results)

    def ttft(self, connectors: Sequence[str]) -> None:
        cells = self._report["ttft"] = []
        print(TTFT_HEADING, flush=True)
        for name in connectors:
            timed: list[Timed] = []
            try:
                with self._going_on(f"TTFT, {name}"), self._set_up(name) as setup:
                    asyncio.run(
                        measure_ttft(self._starter, self._load, self._cores, setup, self._blocks, self._say, timed)
                    )
            finally:
                if timed:
                    cells.append(ttft_report(name, timed))
                    print(ttft_line(cells[-1]), flush=True)
        print(flush=True)

    def transfer(self, connectors: Sequence[str]) -> None:
        cells = self._report["transfer"] = []
        print(TRANSFER_HEADING, flush=True)
        for name in connectors:
            for block_kib in self._load.block_kib:
                what = f"transfer, {name}, blocks of {block_kib} KiB"
                self._say(what)
                found: Timings = {}
                try:
                    with self._going_on(what), self._set_up(name) as setup:
                        measure_transfer(self._load, self._cores, setup, block_kib, self._folder, found)
                finally:
                    if found:
                        cells.append(transfer_report(name, block_kib, found))
                        print("\n".join(transfer_lines(cells[-1])), flush=True)

    @contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        """What fails of one connector keeps no other one from being measured."""
        try:
            yield
        except OutriderError as error:
            self.failures.append(f"{what}: {error}")
            print(f"outrider: {self.failures[-1]}", file=sys.stderr, flush=True)

    @cached_property
    def _blocks(self) -> BlockShape:
        self._say("how large blocks are")
        return asyncio.run(self._starter.block_shape(self._cores.both))

    def _set_up(self, name: str) -> AbstractContextManager[Setup]:
        return set_up(name, self._folder, self._storage, self._cores.both)

    def _say(self, what: str) -> None:
        """What is measured next, and when that is, on stderr."""
        minutes, seconds = divmod(int(time.monotonic() - self._begun_s), 60)
        print(f"{minutes:>2}:{seconds:02}  {what}", file=sys.stderr, flush=True)
