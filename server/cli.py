"""The command line: finds the subcommand's module, and turns errors into exit codes.

Exit codes: 0 done, 1 the work failed, 2 a wrong setting or argument, 130 interrupted.
"""

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from server.errors import ConfigError, OutriderError
from server.suggestions import did_you_mean
from server.version import VERSION

COMMANDS = {
    "serve": "serve a model over gRPC",
    "pull": "fetch a model ahead of time",
    "generate": "send one prompt to a server and stream the answer",
    "chat": "talk to the model of a server",
    "demo": "start a server, ask it a question, and show the answer and its speed",
    "admin": "see and change what a running server does",
    "bench": "measure a server under load, or an engine by itself",
}
"""Subcommands and their help; each is server/commands/NAME.py with `configure(parser)` and `run(args)`.

Only the chosen one is imported, so that none pays for another's dependencies.
"""

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class _Parser(argparse.ArgumentParser):
    """Reports every mistake as one ConfigError, without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Leave nothing unknown: subparsers are called through here, so the one that the argument was for reports it.

        Raises: ConfigError on the first argument that no option took, naming the nearest option, or the
        positional argument of that name.
        """
        parsed, unknown = super().parse_known_args(args, namespace)
        if not unknown:
            return parsed, unknown
        name = unknown[0].partition("=")[0]
        for action in self._get_positional_actions():
            if name == f"--{action.dest}":
                raise ConfigError(f"unknown argument {name}; write {self.prog} {action.metavar or action.dest}")
        raise ConfigError(f"unknown argument {name}{did_you_mean(name, self._option_string_actions)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns: the exit code; nothing but a bug raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # the shell's >&-: a file opened later would take its place
        return _fail(OutriderError("standard output is closed"), EXIT_FAILED)
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # here, where what it raises is still handled
    except ConfigError as error:
        return _fail(error, EXIT_USAGE)
    except OutriderError as error:
        return _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone, which it is free to do.
        _abandon_stdout()
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        _abandon_stdout()
        return _fail(OutriderError(f"cannot write the output: {error.strerror}"), EXIT_FAILED)


def run_process() -> NoReturn:
    """`main` as all that this process is for."""
    code = main()
    if code == EXIT_INTERRUPTED:
        # An orderly end would tear down threads that load a model or compute, and be aborted for that.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    parser = _Parser(prog="outrider", description="Serve large language models over gRPC.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"outrider {VERSION}")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    if chosen is not None and chosen not in COMMANDS:
        known = f"; there are {', '.join(COMMANDS)}"
        hint = did_you_mean(chosen, (*COMMANDS, *parser._option_string_actions)) or known
        raise ConfigError(f"unknown command {chosen}{hint}")
    commands = {
        name: subparsers.add_parser(name, help=words, description=words, allow_abbrev=False)
        for name, words in COMMANDS.items()
    }
    if chosen is None:
        parser.parse_args(arguments)  # prints help or the version
        raise ConfigError(f"a command is required: {', '.join(COMMANDS)}")
    # Read once, when gRPC is imported. Its notes on lost connections would stand beside our one line.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    command = importlib.import_module(f"server.commands.{chosen}")
    command.configure(commands[chosen])
    return int(command.run(parser.parse_args(arguments)))


def _abandon_stdout() -> None:
    """Without this, the interpreter's last flush complains too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: OutriderError, code: int) -> int:
    print(f"outrider: {' '.join(str(error).split())}", file=sys.stderr)
    return code
