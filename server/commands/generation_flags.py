"""The flags of commands that generate: where the server is, and every parameter of a generation."""

import argparse
import math
from collections.abc import Callable, Collection
from typing import TypeVar, cast

from clients.requests import GenerateOptions, SamplingOptions

DEFAULT_TARGET = "127.0.0.1:50051"
_Value = TypeVar("_Value")


def add_call_flags(parser: argparse.ArgumentParser) -> None:
    """Add --target and --timeout."""
    parser.add_argument(
        "--target", type=target, default=DEFAULT_TARGET, metavar="HOST:PORT", help="server; unix:PATH too"
    )
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="deadline of each call; none if not given")


def add_generation_flags(parser: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    """Add every sampling parameter, speculation, priority and cache salt. What is not given, the server decides.

    Args:
        leave_out: flags, without dashes, that the command could not honour.
    """
    sampling = parser.add_argument_group("sampling", "unset parameters follow the model's generation_config")
    for name, kind, metavar, words in (
        ("temperature", float, "T", "divides the logits; 0 is greedy"),
        ("top-k", int, "K", "keep the K likeliest tokens; 0 or -1 keeps all"),
        ("top-p", float, "P", "keep the smallest set of tokens with this probability"),
        ("min-p", float, "P", "drop tokens less likely than this share of the likeliest"),
        ("repetition-penalty", float, "X", "above 1 discourages tokens seen in prompt or output"),
        ("frequency-penalty", float, "X", "subtracted once per occurrence in the output"),
        ("presence-penalty", float, "X", "subtracted once if a token occurs in the output"),
        ("logit-bias", list_of(_bias), "ID:BIAS,...", "added to the logits of these tokens"),
        ("allowed-token-ids", list_of(int), "ID,...", "the only tokens that may be generated"),
        ("seed", int, "N", "make the answer repeatable"),
        ("n", int, "N", "number of choices"),
        ("max-tokens", int, "N", "most tokens per choice; to the end of the context if not given"),
        ("min-tokens", int, "N", "no stop rule applies before this many tokens"),
        ("stop-token-ids", list_of(int), "ID,...", "tokens that end the answer"),
        ("logprobs", int, "N", "report log probabilities of the chosen and the N likeliest tokens (with --json)"),
        ("prompt-logprobs", int, "N", "the same for the prompt (with --json)"),
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

    request = parser.add_argument_group("request")
    request.add_argument("--speculation", action=argparse.BooleanOptionalAction, help="speculative decoding, if served")
    request.add_argument("--num-speculative-tokens", type=int, metavar="K", help="most draft tokens per step")
    request.add_argument("--priority", type=int, metavar="N", help="lower runs earlier under the priority policy")
    request.add_argument("--cache-salt", metavar="TEXT", help="share cached prefixes with the same salt only")


def generation_options(args: argparse.Namespace) -> GenerateOptions:
    """What `add_generation_flags` parsed, as the clients take it."""
    names = (*SamplingOptions.__annotations__, "speculation", "num_speculative_tokens", "priority", "cache_salt")
    options = {name: getattr(args, name, None) for name in names}
    if options["logit_bias"] is not None:
        options["logit_bias"] = dict(options["logit_bias"])
    return cast("GenerateOptions", options)


def list_of(kind: Callable[[str], _Value]) -> Callable[[str], list[_Value]]:
    """A parser of comma-separated values; empty text is the empty list."""

    def parse(text: str) -> list[_Value]:
        try:
            return [kind(item) for item in text.split(",")] if text else []
        except ValueError:
            raise argparse.ArgumentTypeError(f"not a comma-separated list: {text!r}") from None

    return parse


def target(text: str) -> str:
    """A parser of where a server is: a port left out would be gRPC's guess, 443."""
    scheme, _, path = text.partition(":")
    host, _, port = text.rpartition(":")
    if not (path if scheme == "unix" else host and port.isdecimal()):
        raise argparse.ArgumentTypeError(f"give HOST:PORT or unix:PATH, got {text!r}")
    return text


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition(":")
    return int(token_id), float(bias)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return seconds
