"""`outrider chat`: a conversation with the model of a server, on a terminal or from a pipe."""

import argparse
import sys
from collections.abc import Iterator

from clients.disaggregated_sync import BlockingDisaggregatedClient
from clients.errors import InvalidRequestError, OutriderClientError
from clients.requests import GenerateOptions
from clients.sync import Client
from server.commands.call_errors import explain, one_line_errors
from server.commands.generation_flags import DEFAULT_TARGET, add_generation_flags, generation_options
from server.commands.node_flags import HANDED_ON, add_node_flags, client_of, is_handed_on, name_of
from server.commands.standard_input import standard_input
from server.commands.waiting import waiting_for
from server.errors import OutriderError

_ONE_TEXT = ("n", "logprobs", "prompt-logprobs", "speculation-metrics")
"""Flags left out: a conversation goes on with one answer, shown as text."""
_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the system message and the parameters of a generation that ends in one text."""
    parser.add_argument("--system", metavar="TEXT", help="system message at the beginning of the conversation")
    add_node_flags(parser)
    add_generation_flags(parser, leave_out=_ONE_TEXT)
    parser.epilog = f"{_HELP}."


def run(args: argparse.Namespace) -> int:
    """Answer every line until the input ends.

    Raises: ConfigError for input that is no text; OutriderError, from a pipe, for the first failed call.
    """
    options = generation_options(args)
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    beginning = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = list(beginning)
    with one_line_errors(name_of(args), args.timeout), client_of(args) as client:
        if is_terminal:
            print(f"{_model_name(args)} on {name_of(args)}. {_HELP}.")
        for line in _lines(is_terminal=is_terminal):
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(beginning)
                continue
            question = {"role": "user", "content": line}
            try:
                answer = _answer(client, [*messages, question], options, args.timeout)
            except OutriderClientError as error:
                if not is_terminal:
                    raise
                hint = " (/reset makes room)" if isinstance(error, InvalidRequestError) else ""
                print(f"outrider: {explain(error, args.timeout)}{hint}", file=sys.stderr)
            else:
                messages += [question, {"role": "assistant", "content": answer}]
    return 0


def _lines(*, is_terminal: bool) -> Iterator[str]:
    """What is typed, or every line of a pipe; blank ones are left out."""
    with standard_input() as stdin:
        if not is_terminal:
            yield from filter(None, map(str.strip, stdin))
            return
        import readline  # noqa: F401 - gives input() its history and editing

        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return
            if line:
                yield line


def _model_name(args: argparse.Namespace) -> str:
    """What the server, or the first of those that answer, serves."""
    with Client(args.decode[0] if args.decode else args.target or DEFAULT_TARGET) as client:
        return client.model_info(timeout_s=args.timeout).served_model_name


def _answer(
    client: Client | BlockingDisaggregatedClient,
    messages: list[dict[str, str]],
    options: GenerateOptions,
    timeout_s: float | None,
) -> str:
    """Print the answer as it comes. Returns: as much of it as came before the end or Ctrl-C.

    Raises: OutriderError from a node that does no more than begin it.
    """
    options = {**options, "messages": messages}
    parts: list[str] = []
    is_whole = True
    try:
        with (
            client.generate(timeout_s=timeout_s, **options) as generation,
            waiting_for("thinking") as stop_waiting,
        ):
            for delta in generation:
                stop_waiting()
                parts.append(delta.text)
                print(delta.text, end="", flush=True)
            is_whole = not is_handed_on(generation.finished.values())
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    except OutriderClientError:
        if parts:
            print(flush=True)  # the error is a line of its own
        raise
    print(flush=True)
    if not is_whole:
        raise OutriderError(HANDED_ON)
    return "".join(parts)
