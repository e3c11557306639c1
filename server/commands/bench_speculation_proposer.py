"""`outrider bench speculation` for one proposer: the model is loaded once, and all else goes by turns."""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from clients.workload import Prompt
from server.commands.bench_device import device_name
from server.commands.bench_settings import check_capacity
from server.commands.bench_speculation_load import Load
from server.commands.bench_speculation_prompts import PROMPTS
from server.commands.bench_speculation_report import cell_line, cell_report, heading, phase_report, verdict
from server.commands.bench_speculation_rounds import (
    Bench,
    Candidate,
    Measured,
    candidates,
    rotated,
)
from server.compose import Core, build_core
from server.config import Config
from server.host import cpu_count
from server.speculative_config import SPECULATIVE_CONFIG


def measure_proposer(config: Config, load: Load, reports: list[dict[str, Any]]) -> None:
    """Build the engine, measure, print the table; if that ends early, what there is of it.

    Args: reports: a report is added, JSON values, and filled in as it goes.
    Raises: ConfigError where the load does not fit; whatever loading the model raises.
    """
    core = build_core(config)
    info = core.engine.model_info
    change_tokens = load.change_tokens(info.num_speculative_tokens)
    check_capacity(
        info,
        config.scheduler.max_num_seqs,
        flag="--concurrency",
        batch=max(load.concurrency),
        num_tokens=load.input_len + max(load.output_len, change_tokens),
        lengths="--input-len + the longer of --output-len and what is generated around a change (--change-steps)",
    )
    report: dict[str, Any] = {
        "config": config.flat()[SPECULATIVE_CONFIG],
        "model": {
            "name": info.served_model_name,
            "architecture": info.architecture,
            "dtype": info.dtype,
            "device": info.device,
        },
        "device": {
            "name": device_name(info.device),
            "threads": cpu_count() if info.device == "cpu" else torch.get_num_threads(),
        },
    }
    cells: list[dict[str, Any]] = []
    changes: list[dict[str, Any]] = []
    reports.append({**report, "cells": cells, "changes": changes})
    print(f"{info.served_model_name}, {info.dtype} on {report['device']['name']}: {json.dumps(report['config'])}")
    try:
        asyncio.run(_measure(core, load, change_tokens, cells, changes))
    finally:
        print("\n".join((*verdict(cells, "cells"), *verdict(changes, "after a change"), "")), flush=True)


async def _measure(
    core: Core, load: Load, change_tokens: int, cells: list[dict[str, Any]], changes: list[dict[str, Any]]
) -> None:
    bench = _ProposerBench(core, load)
    try:
        await core.engine.start()
        await bench.cells(cells)
        if load.change_steps:
            await bench.changes(change_tokens, changes)
    finally:
        await core.engine.stop()


class _ProposerBench:
    """The tables of one proposer, printed line by line."""

    def __init__(self, core: Core, load: Load) -> None:
        self._core = core
        self._load = load
        self._bench = Bench(core, load.temperature)
        self._max_drafts = core.engine.model_info.num_speculative_tokens
        self._candidates = candidates(load.drafts, self._max_drafts)
        self._begun_s = time.monotonic()

    async def cells(self, reports: list[dict[str, Any]]) -> None:
        """Every workload at every concurrency; the policy auto keeps what it has learned, as it does in a server.

        Args: reports: one is added for each; if it ends early, of the turns that there were.
        """
        load = self._load
        policies = {candidate: self._bench.policy(candidate) for candidate in self._candidates}
        print(heading([candidate.name for candidate in policies]), flush=True)
        for workload in load.workloads:
            prompts = self._prompts(workload, load.output_len)
            for concurrency in load.concurrency:
                turns: list[dict[Candidate, Measured]] = []
                try:
                    for turn in range(1 + load.repeat):
                        self._say(f"{workload} x {concurrency}, turn {1 + turn} of {1 + load.repeat}")
                        batch = _take(prompts, concurrency)
                        order = rotated(self._candidates, turn)
                        turns.append({each: await self._bench.measure(policies[each], batch) for each in order})
                finally:
                    if len(turns) <= load.repeat:
                        self._say(f"{workload} x {concurrency} ended with {max(0, len(turns) - 1)} turns that count")
                    if counted := turns[1:]:
                        found = {candidate: [turn[candidate] for turn in counted] for candidate in policies}
                        reports.append(cell_report(workload, concurrency, found))
                        print(cell_line(reports[-1]), flush=True)

    async def changes(self, output_len: int, reports: list[dict[str, Any]]) -> None:
        """From the first workload at the lowest load to the last one at the highest and back, without a pause.

        The policy auto begins anew in each turn: it has seen none of the three.

        Args: reports: one is added for each of the three; if it ends early, of the turns that there were.
        """
        load = self._load
        low, high = (load.workloads[0], min(load.concurrency)), (load.workloads[-1], max(load.concurrency))
        phases = (low, high, low)
        sources = {workload: self._prompts(workload, output_len) for workload, _ in phases}
        turns: list[dict[Candidate, list[float]]] = []
        try:
            for turn in range(load.repeat):
                self._say(f"changes, turn {1 + turn} of {load.repeat}")
                batches = [_take(sources[workload], concurrency) for workload, concurrency in phases]
                rates: dict[Candidate, list[float]] = {}
                for candidate in rotated(self._candidates, turn):
                    policy = self._bench.policy(candidate)
                    rates[candidate] = await self._bench.measure_phases(policy, batches, load.change_steps)
                turns.append(rates)
        finally:
            if turns:
                for i, phase in enumerate(phases):
                    found = {candidate: [rates[candidate][i] for rates in turns] for candidate in self._candidates}
                    reports.append(phase_report(*phase, found))
                print(f"one after the other, from {load.change_steps} steps after each change on:")
                print("\n".join(map(cell_line, reports)), flush=True)

    def _say(self, what: str) -> None:
        """How far it is, and since when, on stderr."""
        minutes, seconds = divmod(int(time.monotonic() - self._begun_s), 60)
        print(f"{minutes:>2}:{seconds:02}  {what}", file=sys.stderr, flush=True)

    def _prompts(self, workload: str, output_len: int) -> Iterator[Prompt]:
        load = self._load
        return PROMPTS[workload](
            self._core.preprocessor, input_len=load.input_len, output_len=output_len, seed=load.seed
        )


def _take(prompts: Iterator[Prompt], count: int) -> list[Prompt]:
    return list(itertools.islice(prompts, count))
