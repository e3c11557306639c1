"""`outrider bench speculation` for one proposer: the model is loaded once, and all else goes by turns."""

import itertools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

from clients.workload import Prompt
from server.commands.bench_device import device_name
from server.commands.bench_settings import check_capacity
from server.commands.bench_speculation_load import Load
from server.commands.bench_speculation_prompts import PROMPTS
from server.commands.bench_speculation_report import cell_line, cell_report, heading, phase_report, verdict
from server.commands.bench_speculation_rounds import Bench, Candidate, candidates, measure_cell, rotated
from server.compose import Core, build_core
from server.config import Config
from server.host import cpu_count
from server.speculative_config import SPECULATIVE_CONFIG


async def measure_proposer(config: Config, load: Load) -> dict[str, Any]:
    """Build the engine, measure, print the table. Returns: JSON values.

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
    bench = _ProposerBench(core, load)
    await core.engine.start()
    try:
        print(f"{info.served_model_name}, {info.dtype} on {report['device']['name']}: {json.dumps(report['config'])}")
        cells = [cell async for cell in bench.cells()]
        changes = await bench.changes(change_tokens) if load.change_steps else []
        print("\n".join((*verdict(cells, "cells"), *verdict(changes, "after a change"), "")), flush=True)
    finally:
        await core.engine.stop()
    return {**report, "cells": cells, "changes": changes}


class _ProposerBench:
    """The tables of one proposer, printed line by line."""

    def __init__(self, core: Core, load: Load) -> None:
        self._core = core
        self._load = load
        self._bench = Bench(core, load.temperature)
        self._max_drafts = core.engine.model_info.num_speculative_tokens
        self._candidates = candidates(load.drafts, self._max_drafts)

    async def cells(self) -> AsyncIterator[dict[str, Any]]:
        """Every workload at every concurrency; the policy auto keeps what it has learned, as it does in a server."""
        load = self._load
        policies = {candidate: candidate.policy(self._max_drafts) for candidate in self._candidates}
        print(heading([candidate.name for candidate in policies]), flush=True)
        for workload in load.workloads:
            prompts = self._prompts(workload, load.output_len)
            for concurrency in load.concurrency:
                turns = [_take(prompts, concurrency) for _ in range(1 + load.repeat)]
                cell = cell_report(workload, concurrency, await measure_cell(self._bench, policies, turns))
                print(cell_line(cell), flush=True)
                yield cell

    async def changes(self, output_len: int) -> list[dict[str, Any]]:
        """From the first workload at the lowest load to the last one at the highest and back, without a pause.

        The policy auto begins anew in each turn: it has seen none of the three.
        """
        load = self._load
        low, high = (load.workloads[0], min(load.concurrency)), (load.workloads[-1], max(load.concurrency))
        phases = (low, high, low)
        sources = {workload: self._prompts(workload, output_len) for workload, _ in phases}
        rates: list[dict[Candidate, list[float]]] = [{each: [] for each in self._candidates} for _ in phases]
        for turn in range(load.repeat):
            batches = [_take(sources[workload], concurrency) for workload, concurrency in phases]
            for candidate in rotated(self._candidates, turn):
                policy = candidate.policy(self._max_drafts)
                found = await self._bench.measure_phases(policy, batches, load.change_steps)
                for of_phase, rate in zip(rates, found, strict=True):
                    of_phase[candidate].append(rate)
        reports = [phase_report(*phase, of_phase) for phase, of_phase in zip(phases, rates, strict=True)]
        print(f"one after the other, from {load.change_steps} steps after each change on:")
        print("\n".join(map(cell_line, reports)), flush=True)
        return reports

    def _prompts(self, workload: str, output_len: int) -> Iterator[Prompt]:
        load = self._load
        return PROMPTS[workload](
            self._core.preprocessor, input_len=load.input_len, output_len=output_len, seed=load.seed
        )


def _take(prompts: Iterator[Prompt], count: int) -> list[Prompt]:
    return list(itertools.islice(prompts, count))
