"""`outrider generate`: one prompt to a server, the answer to stdout as it comes."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from clients.disaggregated_sync import BlockingDisaggregatedGeneration
from clients.errors import InvalidRequestError, OutriderClientError
from clients.outputs import Delta, Event, Finished, PromptLogprobs, Started
from clients.requests import GenerateOptions
from clients.sync import Generation
from server.commands.call_errors import explain, one_line_errors
from server.commands.flag_types import list_of
from server.commands.generation_flags import add_generation_flags, generation_options
from server.commands.node_flags import HANDED_ON, add_node_flags, client_of, is_handed_on, name_of
from server.commands.speculation_figures import speculation_figures
from server.commands.standard_input import standard_input
from server.commands.waiting import waiting_for
from server.errors import ConfigError

AnyGeneration = Generation | BlockingDisaggregatedGeneration


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the prompt in its forms and all parameters of a generation."""
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to continue; - reads standard input")
    parser.add_argument("--file", type=Path, metavar="FILE", help="read the prompt from a file")
    parser.add_argument("--token-ids", type=list_of(int, "ID"), metavar="ID,...", help="the prompt as token ids")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message, by the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message to go before it; implies --chat")
    parser.add_argument("--request-id", metavar="ID", help="names the request; a fresh UUID if not given")
    parser.add_argument(
        "--json", action="store_true", help="print every event as a line of JSON; the last is error if it fails"
    )
    add_node_flags(parser)
    add_generation_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Generate and print.

    Raises: ConfigError for prompts that are missing, contradictory or unreadable, and for log
        probabilities that would not be shown; OutriderError for failed calls.
    """
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(args, name) is not None and not args.json:
            raise ConfigError(f"--{name.replace('_', '-')} is reported with --json only")
    options: GenerateOptions = {**generation_options(args), "request_id": args.request_id}
    prompt = _read_prompt(args)
    if args.chat or args.system is not None:
        if prompt is None:
            raise ConfigError("--token-ids cannot be a message: leave out --chat and --system")
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        options["messages"] = [*system, {"role": "user", "content": prompt}]
        prompt = None
    elif prompt is None:
        options["token_ids"] = args.token_ids
    with (
        one_line_errors(name_of(args), args.timeout),
        _json_error(args),
        client_of(args) as client,
        client.generate(prompt, timeout_s=args.timeout, **options) as generation,
        waiting_for("waiting for the first token") as stop_waiting,
    ):
        if args.json:
            _print_json(generation, stop_waiting)
        else:
            _print_text(generation, stop_waiting, num_choices=args.n or 1)
            if args.speculation_metrics is not None:
                _print_speculation(generation)
        if is_handed_on(generation.finished.values()):
            print(f"outrider: {HANDED_ON}", file=sys.stderr)
            return 1
    return 0


def _read_prompt(args: argparse.Namespace) -> str | None:
    """The prompt's text, None if it was given as ids."""
    given = [name for name in ("prompt", "file", "token_ids") if getattr(args, name) is not None]
    if len(given) != 1:
        raise ConfigError("give exactly one prompt: PROMPT, - for standard input, --file or --token-ids")
    try:
        if args.file is not None:
            return str(args.file.read_text(encoding="utf-8"))
        if args.prompt != "-":
            return cast("str | None", args.prompt)
        with standard_input() as stdin:
            return stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompt: {error}") from error


def _print_text(generation: AnyGeneration, stop_waiting: Callable[[], None], *, num_choices: int) -> None:
    """One answer as it comes; several, which come mixed up, one after the other at the end."""
    text = ""
    try:
        for delta in generation:
            stop_waiting()
            if num_choices == 1:
                text = delta.text or text
                print(delta.text, end="", flush=True)
    except OutriderClientError:
        if text and not text.endswith("\n"):
            print(flush=True)  # the error is a line of its own
        raise
    if num_choices == 1:
        print(flush=True)
        return
    for choice in generation.output.choices:
        print(f"--- choice {choice.index} ({choice.finished.finish_reason})\n{choice.text}", flush=True)


def _print_speculation(generation: AnyGeneration) -> None:
    """To standard error, so that the answer can be taken as it is."""
    for choice in generation.output.choices:
        name = f"speculation, choice {choice.index}" if len(generation.output.choices) > 1 else "speculation"
        for line in speculation_figures(choice.finished.speculation):
            print(f"{name}: {line}", file=sys.stderr)


def _print_json(generation: AnyGeneration, stop_waiting: Callable[[], None]) -> None:
    for event in generation.events():
        stop_waiting()
        print(json.dumps(_as_json(event, generation), ensure_ascii=False), flush=True)


@contextmanager
def _json_error(args: argparse.Namespace) -> Iterator[None]:
    """With --json, make the failure the last event, and let it go on to standard error and the exit code."""
    try:
        yield
    except OutriderClientError as error:
        if args.json:
            fields: dict[str, object] = {"code": error.code.name, "message": explain(error, args.timeout)}
            if isinstance(error, InvalidRequestError):
                fields["violations"] = [dataclasses.asdict(violation) for violation in error.violations]
            print(json.dumps({"error": fields}, ensure_ascii=False), flush=True)
        raise


def _as_json(event: Event, generation: AnyGeneration) -> dict[str, object]:
    """One event under its name; `finished` also has the choice's whole text and ids."""
    match event:
        case Started():
            return {"started": dataclasses.asdict(event)}
        case PromptLogprobs():
            return {"prompt_logprobs": [dataclasses.asdict(position) for position in event.positions]}
        case Delta():
            return {"delta": dataclasses.asdict(event)}
        case Finished():
            whole = next(choice for choice in generation.output.choices if choice.index == event.index)
            fields = dataclasses.asdict(event)
            return {
                "finished": {"index": fields.pop("index"), "text": whole.text, "token_ids": whole.token_ids, **fields}
            }
