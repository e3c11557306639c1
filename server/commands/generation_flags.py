"""The flags of commands that generate: where the server is, and every parameter of a generation."""

import argparse
from collections.abc import Collection
from typing import cast

from clients.requests import GenerateOptions, SamplingOptions
from server.commands.flag_types import (
    at_least,
    bias,
    file_or_text,
    integer,
    json_schema,
    list_of,
    number,
    seconds,
    target,
)

_REQUEST_OPTIONS = ("speculation", "num_speculative_tokens", "speculation_metrics", "priority", "cache_salt")
DEFAULT_TARGET = "127.0.0.1:50051"


def add_call_flags(parser: argparse.ArgumentParser) -> None:
    """Add --target and --timeout."""
    parser.add_argument(
        "--target",
        type=target,
        default=DEFAULT_TARGET,
        metavar="HOST:PORT",
        help=f"server; unix:PATH too (default: {DEFAULT_TARGET})",
    )
    parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help="deadline of each call; none if not given")


def add_generation_flags(parser: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    """Add every sampling parameter, speculation, priority and cache salt. What is not given, the server decides.

    Args:
        leave_out: flags, without dashes, that the command could not honour.
    """
    sampling = parser.add_argument_group("sampling", "unset parameters follow the model's generation_config")
    for name, kind, metavar, words in (
        ("temperature", number, "T", "divides the logits; 0 is greedy"),
        ("top-k", integer, "K", "keep the K likeliest tokens; 0 or -1 keeps all"),
        ("top-p", number, "P", "keep the smallest set of tokens with this probability"),
        ("min-p", number, "P", "drop tokens less likely than this share of the likeliest"),
        ("repetition-penalty", number, "X", "above 1 discourages tokens seen in prompt or output"),
        ("frequency-penalty", number, "X", "subtracted once per occurrence in the output"),
        ("presence-penalty", number, "X", "subtracted once if a token occurs in the output"),
        ("logit-bias", list_of(bias, "ID:BIAS"), "ID:BIAS,...", "added to the logits of these tokens"),
        ("allowed-token-ids", list_of(int, "ID"), "ID,...", "the only tokens that may be generated"),
        ("seed", integer, "N", "make the answer repeatable"),
        ("n", integer, "N", "number of choices"),
        ("max-tokens", integer, "N", "most tokens per choice; to the end of the context if not given"),
        ("min-tokens", integer, "N", "no stop rule applies before this many tokens"),
        ("stop-token-ids", list_of(int, "ID"), "ID,...", "tokens that end the answer"),
        ("logprobs", integer, "N", "report log probabilities of the chosen and the N likeliest tokens (with --json)"),
        ("prompt-logprobs", integer, "N", "the same for the prompt (with --json)"),
    ):
        if name not in leave_out:
            sampling.add_argument(f"--{name}", type=kind, metavar=metavar, help=words)
    for name, words in (
        ("stop", "text that ends the answer; may be given several times"),
        ("bad-words", "text that is never completed; may be given several times"),
    ):
        sampling.add_argument(f"--{name}", action="append", metavar="TEXT", help=words)
    for name, words in (
        ("include-stop-str-in-output", "keep the matched stop text"),
        ("ignore-eos", "go on past the model's end-of-sequence tokens"),
        ("skip-special-tokens", "leave special tokens out of the text"),
    ):
        sampling.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=words)

    _add_constraint_flags(parser)

    request = parser.add_argument_group("request")
    request.add_argument("--speculation", action=argparse.BooleanOptionalAction, help="speculative decoding, if served")
    request.add_argument(
        "--num-speculative-tokens",
        type=at_least(0),
        metavar="K",
        help="most draft tokens per step, up to what is served; 0 is none",
    )
    if "speculation-metrics" not in leave_out:
        request.add_argument(
            "--speculation-metrics",
            choices=("summary", "detailed"),
            help="say at the end what it did, or of each step",
        )
    request.add_argument("--priority", type=integer, metavar="N", help="lower runs earlier under the priority policy")
    request.add_argument("--cache-salt", metavar="TEXT", help="share cached prefixes with the same salt only")


def _add_constraint_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("guided decoding", "what the answer must look like; one of them")
    group.add_argument("--json-schema", type=json_schema, metavar="FILE|TEXT", help="JSON of this schema")
    group.add_argument("--json-object", action="store_true", default=None, help="any JSON object")
    group.add_argument("--regex", metavar="TEXT", help="text that matches as a whole")
    group.add_argument("--grammar", type=file_or_text(":"), metavar="FILE|TEXT", help="text of this Lark grammar")
    group.add_argument("--choice", action="append", metavar="TEXT", help="one of these; to be given for each of them")


def generation_options(args: argparse.Namespace) -> GenerateOptions:
    """What `add_generation_flags` parsed, as the clients take it."""
    names = (*SamplingOptions.__annotations__, *_REQUEST_OPTIONS)
    options = {name: getattr(args, name, None) for name in names}
    if options["logit_bias"] is not None:
        options["logit_bias"] = dict(options["logit_bias"])
    return cast("GenerateOptions", options)
