"""`outrider bench speculation`: every number of drafts, and the policy auto, by turns in one engine."""

import argparse
import gc
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from server.commands.bench_environment import describe_host, describe_run
from server.commands.bench_output import add_output, check_output, write_report
from server.commands.bench_settings import add_settings, given_settings, resolve_compiled
from server.commands.bench_speculation_load import GOALS, WORKLOADS, Load
from server.commands.flag_types import at_least, integer, list_of, number
from server.config_sources import ResolvedConfig
from server.errors import ConfigError
from server.speculative_config import AUTO, SPECULATIVE_CONFIG, PolicyConfig

_LIBRARIES = ("torch", "triton", "transformers")
_RANDOM = {"method": "server.commands.bench_random_drafts:RandomConfig", "num_speculative_tokens": 8}
_DEFAULT_CONFIGS = ('{"method": "ngram", "num_speculative_tokens": 8}', "random")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what is run and how often, and the settings of model and engine."""
    names = "{" + ",".join(WORKLOADS) + "}"
    for name, parse, default, metavar, words in (
        ("--concurrency", list_of(at_least(1), "SIZE"), "1,4,8,16", "SIZE[,SIZE...]", "sequences that run together"),
        ("--drafts", list_of(at_least(0), "K"), "0,1,2,3,5,8", "K[,K...]", "fixed numbers; at most the proposer's own"),
        (
            "--workloads",
            list_of(_workload, names),
            ",".join(WORKLOADS),
            f"{names}[,...]",
            "prompts of a few words again and again, of prose and code, and of random ids",
        ),
        ("--input-len", at_least(1), "64", "TOKENS", "of each prompt"),
        ("--output-len", at_least(2), "128", "TOKENS", "generated for each"),
        ("--temperature", number, "0", "NUMBER", "of sampling; 0 is greedy"),
        ("--repeat", at_least(1), "5", "N", "measured turns, each with every number of drafts and auto"),
        (
            "--change-steps",
            at_least(0),
            "50",
            "STEPS",
            "that auto has to adapt when workload and load change, and that are measured then; 0 leaves this out",
        ),
        ("--seed", integer, "0", "SEED", "of the prompts"),
    ):
        parser.add_argument(name, type=parse, default=default, metavar=metavar, help=f"{words} (default: {default})")
    parser.epilog = (
        "--speculative-config may be given several times, and may be the word random: drafts that are always wrong. "
        f"Default: {' and '.join(_DEFAULT_CONFIGS)}."
    )
    add_output(parser)
    add_settings(parser, takes_several=True)


def run(args: argparse.Namespace) -> int:
    """For each proposer build the engine, measure, print a table; write the JSON.

    What is interrupted, or fails, prints and writes what it has.

    Raises: ConfigError for settings that do not go together; whatever loading the model raises.
    """
    check_output(args.output)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    load = Load.of(args)
    with given_settings(args) as settings, _unadvised():
        configs = [_resolved(settings, text) for text in vars(args).get(SPECULATIVE_CONFIG, _DEFAULT_CONFIGS)]
        # Imports torch, which a wrong argument can do without.
        from server.commands.bench_speculation_proposer import measure_proposer

        report: dict[str, Any] = {
            **describe_run(_LIBRARIES),
            "host": describe_host(),
            "load": asdict(load),
            "settings": {name: it for name, it in configs[0].config.flat().items() if name != SPECULATIVE_CONFIG},
            "goals": GOALS,
            "is_complete": False,
            "proposers": [],
        }
        try:
            for resolved in configs:
                measure_proposer(resolved.config, load, report["proposers"])
                gc.collect()  # one model at a time
            report["is_complete"] = True
        finally:
            write_report(report, args.output)
    return 0


@contextmanager
def _unadvised() -> Iterator[None]:
    """Without a word of drafts that do not pay: that is what is measured."""
    advice = logging.getLogger("server.scheduler.speculation_watch")
    before = advice.level
    advice.setLevel(logging.ERROR)
    try:
        yield
    finally:
        advice.setLevel(before)


def _resolved(settings: Mapping[str, object], text: str) -> ResolvedConfig:
    config = json.dumps(_RANDOM) if text == "random" else text
    resolved = resolve_compiled({**settings, SPECULATIVE_CONFIG: config})
    speculative = resolved.config.speculative
    if speculative == AUTO:
        raise ConfigError(
            f'{SPECULATIVE_CONFIG}: name what is measured in place of auto, such as {{"method": "eagle3"}}'
        )
    if speculative is None:
        raise ConfigError(f"{SPECULATIVE_CONFIG}: name a proposer; without one there is nothing to measure")
    if speculative.policy != PolicyConfig():
        raise ConfigError(f"{SPECULATIVE_CONFIG}: policies are what is measured; leave them out of {text}")
    return resolved


def _workload(text: str) -> str:
    if text not in WORKLOADS:
        raise ValueError(text)
    return text
