"""The flags of commands that generate on one server, or on several that share the work."""

import argparse
from collections.abc import Iterable

from clients.disaggregated_sync import BlockingDisaggregatedClient
from clients.outputs import Finished
from clients.sync import Client
from server.commands.flag_types import list_of, target
from server.commands.generation_flags import DEFAULT_TARGET, add_call_flags
from server.errors import ConfigError

HANDED_ON = (
    "the answer stops at its first token, as this node is of role prefill; "
    "have a decode node go on with --prefill and --decode in place of --target"
)


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """Add --target, --timeout, --prefill and --decode."""
    add_call_flags(parser)
    parser.set_defaults(target=None)  # so that it is known whether one was given
    nodes = parser.add_argument_group("disaggregated serving", "in place of --target")
    for name, words in (
        (
            "prefill",
            "servers that compute the prompt and first token; if none is up, those of --decode do",
        ),
        ("decode", "servers that go on from there; short prompts are theirs alone"),
    ):
        nodes.add_argument(f"--{name}", type=list_of(target, "HOST:PORT"), metavar="HOST:PORT,...", help=words)


def client_of(args: argparse.Namespace) -> Client | BlockingDisaggregatedClient:
    """A client of what `add_node_flags` parsed. Raises: ConfigError for flags that do not go together."""
    if not args.prefill and not args.decode:
        return Client(name_of(args))
    if args.target is not None:
        raise ConfigError("give either --target or --prefill and --decode")
    if not args.decode:
        raise ConfigError("--prefill needs --decode: servers that go on with what is handed on")
    return BlockingDisaggregatedClient(prefill=args.prefill or (), decode=args.decode)


def name_of(args: argparse.Namespace) -> str:
    """What errors call the server, or the servers."""
    return ",".join((*(args.prefill or ()), *(args.decode or ()))) or args.target or DEFAULT_TARGET


def is_handed_on(ends: Iterable[Finished]) -> bool:
    """Whether a server has left the rest to another one, and nobody has asked that."""
    return any(end.finish_reason == "handed_on" for end in ends)
