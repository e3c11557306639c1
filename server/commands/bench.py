"""`outrider bench`: one subcommand per thing that can be measured."""

import argparse
from types import ModuleType

from server.commands import bench_disaggregated, bench_engine, bench_serve, bench_speculation
from server.errors import ConfigError

_BENCHES: dict[str, tuple[ModuleType, str]] = {
    "engine": (bench_engine, "measure the engine's steps in this process, against what the memory allows"),
    "serve": (bench_serve, "put load on a running server and measure it from the outside"),
    "speculation": (bench_speculation, "measure every number of drafts and the policy auto, by turns in this process"),
    "disaggregated": (bench_disaggregated, "start prefill and decode nodes, and measure them against one node"),
}
"""What can be measured: the module with its `configure(parser)` and `run(args)`, and its help."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    subparsers = parser.add_subparsers(dest="bench", metavar="WHAT")
    for name, (module, words) in _BENCHES.items():
        module.configure(subparsers.add_parser(name, help=words, description=words, allow_abbrev=False))


def run(args: argparse.Namespace) -> int:
    """Run the chosen one. Raises: ConfigError if none was."""
    if args.bench is None:
        raise ConfigError(f"bench: say what to measure: {', '.join(_BENCHES)}")
    module, _ = _BENCHES[args.bench]
    return int(module.run(args))
