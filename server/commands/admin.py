"""`outrider admin`: sees and changes what a running server does, through its admin socket."""

import argparse
import json
import os
import shlex

import grpc

from clients.errors import InvalidRequestError, error_from_rpc
from protos.outrider.v1 import admin_pb2 as pb
from protos.outrider.v1.admin_pb2_grpc import AdminStub
from server.commands.call_errors import one_line_errors
from server.commands.flag_types import at_least, list_of, seconds
from server.errors import ConfigError, OutriderError

_SOCKET_VARIABLE = "OUTRIDER_ADMIN_UDS"
_POLICIES = {"auto": pb.DRAFT_POLICY_AUTO, "fixed": pb.DRAFT_POLICY_FIXED}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    subparsers = parser.add_subparsers(dest="subject", metavar="WHAT")
    words = "show how drafts are made and verified, or change it for all requests, those that run included"
    speculation = subparsers.add_parser("speculation", help=words, description=words, allow_abbrev=False)
    speculation.add_argument(
        "--admin-uds",
        metavar="PATH",
        default=os.environ.get(_SOCKET_VARIABLE),
        help=f"the server's admin socket (default: {_SOCKET_VARIABLE})",
    )
    speculation.add_argument("--timeout", type=seconds, metavar="SECONDS", default=30.0, help="deadline (default: 30)")
    speculation.add_argument("--json", action="store_true", help="print what holds as a line of JSON")
    changes = speculation.add_argument_group("changes", "what is not given stays as it is")
    switch = changes.add_mutually_exclusive_group()
    switch.add_argument("--on", dest="enabled", action="store_true", default=None, help="speculate again")
    switch.add_argument("--off", dest="enabled", action="store_false", default=None, help="speculate for nobody")
    changes.add_argument(
        "--num-speculative-tokens",
        type=at_least(1),
        metavar="K",
        help="most drafts per step, up to what the server was started with",
    )
    verified = changes.add_mutually_exclusive_group()
    verified.add_argument(
        "--policy", choices=tuple(_POLICIES), help="how many drafts are verified: as many as pay, or all"
    )
    verified.add_argument(
        "--num-speculative-tokens-per-batch-size",
        type=list_of(_rows_and_drafts, "ROWS:DRAFTS"),
        metavar="ROWS:DRAFTS,...",
        help="from so many sequences in a step on so many drafts of each, in place of a policy",
    )
    changes.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a proposer's parameter; may be given repeatedly",
    )
    changes.add_argument("--member", metavar="INDEX|METHOD", help="whose, where there are several proposers")


def run(args: argparse.Namespace) -> int:
    """Make the call and print what holds then. Raises: ConfigError; OutriderError for failed calls."""
    if args.subject is None:
        raise ConfigError("admin: say what to see or change: speculation")
    if not args.admin_uds:
        raise ConfigError(
            f"give --admin-uds or {_SOCKET_VARIABLE}, the socket of a server that was started with "
            "`outrider serve --admin-uds PATH`"
        )
    try:
        request = _request(args)
    except ValueError as error:  # beyond 32 bits, or no UTF-8
        raise ConfigError(f"cannot be sent: {error}") from error
    target = f"unix:{args.admin_uds}"
    remedy = f"start one with `outrider serve --admin-uds {shlex.quote(args.admin_uds)}`"
    if not os.path.exists(args.admin_uds):
        raise OutriderError(f"{target}: there is no such socket; {remedy}")
    with one_line_errors(target, args.timeout, remedy=remedy), grpc.insecure_channel(target) as channel:
        stub = AdminStub(channel)
        try:
            if request == pb.SetSpeculationRequest():
                state = stub.GetSpeculation(pb.GetSpeculationRequest(), timeout=args.timeout).speculation
            else:
                state = stub.SetSpeculation(request, timeout=args.timeout).speculation
        except grpc.RpcError as error:
            raise _by_flags(target, error) from error
    print(_as_json(state) if args.json else _as_text(state), flush=True)
    return 0


def _by_flags(target: str, failure: grpc.RpcError) -> Exception:
    """The error of a failed call; refused fields by the names of their flags."""
    if failure.code() == grpc.StatusCode.UNIMPLEMENTED:
        return OutriderError(
            f"{target}: this socket takes no admin calls; give the one of `outrider serve --admin-uds`"
        )
    error = error_from_rpc(failure)
    if not (isinstance(error, InvalidRequestError) and error.violations):
        return error
    refused = "; ".join(f"{_flag(violation.field)}: {violation.description}" for violation in error.violations)
    return OutriderError(f"{target}: {refused}")


def _flag(field: str) -> str:
    """What a field of SetSpeculationRequest is given by."""
    match field.split(".", 2):
        case ["enabled"]:
            return "--on"
        case [_, "index" | "method"]:
            return "--member"
        case [_, "parameters", *name]:
            return " ".join(("--set", *name))
    return f"--{field.replace('_', '-')}"


def _request(args: argparse.Namespace) -> pb.SetSpeculationRequest:
    request = pb.SetSpeculationRequest(enabled=args.enabled, num_speculative_tokens=args.num_speculative_tokens)
    if args.policy is not None:
        request.policy = _POLICIES[args.policy]
    if args.num_speculative_tokens_per_batch_size is not None:
        schedule = dict(args.num_speculative_tokens_per_batch_size)
        request.num_speculative_tokens_per_batch_size.CopyFrom(pb.DraftSchedule(num_speculative_tokens=schedule))
    if args.set:
        change = request.proposers.add()
        for item in args.set:
            name, equals, value = item.partition("=")
            if not (name and equals):
                raise ConfigError(f"argument --set: must be NAME=VALUE, got {item!r}")
            change.parameters[name] = value
        if args.member is not None and args.member.isdecimal():
            change.index = int(args.member)
        elif args.member is not None:
            change.method = args.member
    elif args.member is not None:
        raise ConfigError("--member says whose parameters to --set, and none are given")
    return request


def _rows_and_drafts(text: str) -> tuple[int, int]:
    rows, _, drafts = text.partition(":")
    if not (rows.isdecimal() and drafts.isdecimal()):
        raise ValueError(text)
    return int(rows), int(drafts)


def _as_json(state: pb.Speculation) -> str:
    """What holds; either the policy or the schedule is null."""
    return json.dumps(
        {
            "enabled": state.enabled,
            "num_speculative_tokens": state.num_speculative_tokens,
            "max_num_speculative_tokens": state.max_num_speculative_tokens,
            "policy": _policy(state),
            "num_speculative_tokens_per_batch_size": _schedule(state),
            "proposers": [{"method": each.method, "parameters": _parameters(each)} for each in state.proposers],
        }
    )


def _as_text(state: pb.Speculation) -> str:
    if not state.proposers:
        return "the server was started without speculation"
    most = state.num_speculative_tokens
    schedule = [f"{rows}:{min(drafts, most)}" for rows, drafts in (_schedule(state) or {}).items()]
    facts = [
        ("speculation", "on" if state.enabled else "off"),
        ("num_speculative_tokens", f"{state.num_speculative_tokens} of {state.max_num_speculative_tokens}"),
        ("drafts verified", _policy(state) or ",".join(schedule)),
    ]
    for i, each in enumerate(state.proposers):
        facts += [
            (f"proposer {i}", each.method),
            *((f"  {name}", text) for name, text in sorted(each.parameters.items())),
        ]
    width = 2 + max(len(name) for name, _ in facts)
    return "\n".join(f"{name:<{width}}{fact}" for name, fact in facts)


def _policy(state: pb.Speculation) -> str | None:
    return next((name for name, number in _POLICIES.items() if number == state.policy), None)


def _schedule(state: pb.Speculation) -> dict[int, int] | None:
    if not state.HasField("num_speculative_tokens_per_batch_size"):
        return None
    return dict(sorted(state.num_speculative_tokens_per_batch_size.num_speculative_tokens.items()))


def _parameters(proposer: pb.Proposer) -> dict[str, object]:
    return {name: _value(text) for name, text in sorted(proposer.parameters.items())}


def _value(text: str) -> object:
    """Of JSON, or of a string as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
