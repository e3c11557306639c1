"""The arguments of `outrider bench disaggregated`."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from server.commands.bench_disaggregated_load import CONNECTORS, MAX_BLOCKS, PARTS, QUICK_TURNS, TURNS
from server.commands.bench_output import add_output
from server.commands.bench_settings import add_settings
from server.commands.flag_types import at_least, list_of, one_of, per_second, seconds

_PARTS_HELP = (
    "frontier: two nodes against one with each token budget; ttft: KV found against recomputed; "
    "transfer: GB/s and processor time of each connector"
)
_ARGUMENTS: tuple[tuple[str, Callable[[str], object], str, str, str], ...] = (
    ("--parts", list_of(one_of(PARTS), "PART"), ",".join(PARTS), f"{{{','.join(PARTS)}}}[,...]", _PARTS_HELP),
    ("--budgets", list_of(at_least(1), "N"), "32,64,128,256,512", "N[,N...]", "max-num-batched-tokens of one node"),
    ("--rates", list_of(per_second, "PER_S"), "0.2", "PER_S[,...]", "long prompts per second on average"),
    ("--burst-size", at_least(1), "2", "N", "long prompts that come at once"),
    ("--prompt-len", at_least(1), "2000", "TOKENS", "of each long prompt"),
    ("--output-len", at_least(2), "16", "TOKENS", "generated for each"),
    ("--stream-rate", per_second, "1", "PER_S", "short requests per second, whose tokens' gaps are measured"),
    ("--stream-input-len", at_least(1), "32", "TOKENS", "of each"),
    ("--stream-output-len", at_least(3), "128", "TOKENS", "generated for each"),
    ("--duration", seconds, "40", "SECONDS", "in which requests are sent, for each rate, set-up and turn"),
    ("--hop-connector", one_of(CONNECTORS[:-1]), "tcp", "CONNECTOR", "between the two nodes of the frontier"),
    ("--block-kib", list_of(at_least(1), "KIB"), "64,1024", "KIB[,KIB...]", "sizes of blocks in transfers"),
    ("--mib", at_least(1), "256", "MIB", f"moved in each pass of a transfer, in at most {MAX_BLOCKS} blocks"),
    ("--start-timeout", seconds, "600", "SECONDS", "that a server may take to start"),
    ("--seed", at_least(0), "0", "SEED", "of prompts and times"),
)
"""Flag, parser, default, placeholder, and help."""

_QUICK: Mapping[str, str] = {"--budgets": "64,256", "--duration": "20", "--block-kib": "1024", "--mib": "64"}
"""Defaults of a quick run, where they are others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is run and how often, and the settings of the servers."""
    for flag, parse, default, metavar, words in _ARGUMENTS:
        quick = f", with --quick {_QUICK[flag]}" if flag in _QUICK else ""
        parser.add_argument(flag, type=parse, metavar=metavar, help=f"{words} (default: {default}{quick})")
    parser.add_argument(
        "--repeat",
        type=at_least(1),
        metavar="N",
        help=f"measured turns of each part (default: {_listed(TURNS)}, with --quick {_listed(QUICK_TURNS)})",
    )
    parser.add_argument(
        "--quick", action="store_true", help="less of everything, for a first look: a few minutes in place of twelve"
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


def fill_in(args: argparse.Namespace) -> None:
    """Give what was not given its value, which depends on --quick."""
    for flag, parse, default, _, _ in _ARGUMENTS:
        name = flag.removeprefix("--").replace("-", "_")
        if getattr(args, name) is None:
            setattr(args, name, parse(_QUICK.get(flag, default) if args.quick else default))


def _listed(turns: Mapping[str, int]) -> str:
    return ", ".join(f"{count} of {part}" for part, count in turns.items())
