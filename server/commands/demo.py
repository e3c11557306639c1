"""`outrider demo`: a server of its own, one question to it, the answer and how fast it came."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from clients.errors import DeadlineExceededError
from clients.outputs import Finished
from clients.sync import Client
from server.commands.call_errors import one_line_errors
from server.commands.flag_types import integer
from server.commands.own_module import module_command
from server.config_sources import add_arguments
from server.errors import ConfigError, OutriderError

_PROMPT = """\
Here is a Python class:

class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def distance(self, other):
        return ((self.x - other.x) ** 2 + (self.y - other.y) ** 2) ** 0.5

Rewrite it with the class name changed to Vertex. Answer with the code only."""
"""Its answer repeats much of it, as edits of code do; that is easy to draft."""
_POLL_S = 0.5
_KILL_AFTER_S = 60.0
_OWN_ADDRESS = ("host", "port", "uds")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the question and every setting of the server."""
    parser.add_argument("--prompt", default=_PROMPT, metavar="TEXT", help="what to ask")
    parser.add_argument("--max-tokens", type=integer, default=160, metavar="N", help="longest answer in tokens")
    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Start, ask, report, stop.

    Raises: ConfigError for settings the demo makes itself; OutriderError if the server does not start or answer.
    """
    settings = {name: value for name, value in vars(args).items() if name not in ("prompt", "max_tokens")}
    if taken := [name for name in _OWN_ADDRESS if name in settings]:
        raise ConfigError(f"--{taken[0]}: the demo's server listens on a socket of its own; use outrider serve")
    started_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="outrider-") as folder,
        _running_server(settings, socket := f"{folder}/demo.sock") as server,
        one_line_errors("demo"),
        Client(f"unix:{socket}") as client,
    ):
        _wait_ready(client, server)
        print(f"ready after {time.monotonic() - started_s:.1f} s\n\n> {args.prompt}\n", file=sys.stderr, flush=True)
        finished = _ask(client, args.prompt, args.max_tokens)
        print(_report(finished), flush=True)
    return 0


@contextmanager
def _running_server(settings: dict[str, object], socket: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A server process that is asked to stop when the block ends, and killed if it will not."""
    command, environ = module_command("server", "serve", f"--uds={socket}", *_flags(settings))
    server = subprocess.Popen(command, env={**os.environ, **environ})
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _flags(settings: dict[str, object]) -> list[str]:
    """The settings as they were given, as flags again."""
    flags = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag[2:]}")
        else:
            flags.append(str(value) if name == "model" else f"{flag}={value}")
    return flags


def _wait_ready(client: Client, server: "subprocess.Popen[bytes]") -> None:
    """Wait as long as the server lives: a first start may have to fetch the model."""
    while server.poll() is None:
        try:
            client.wait_ready(timeout_s=_POLL_S)
        except DeadlineExceededError:
            continue
        return
    raise OutriderError("the server did not start; it says why above")


def _ask(client: Client, prompt: str, max_tokens: int) -> Finished:
    """Stream the answer to stdout. Returns: its end."""
    has_chat_template = client.model_info().has_chat_template
    text = None if has_chat_template else prompt
    messages = [{"role": "user", "content": prompt}] if has_chat_template else None
    with client.generate(text, messages=messages, max_tokens=max_tokens, temperature=0.0) as generation:
        for delta in generation:
            print(delta.text, end="", flush=True)
    print("\n", flush=True)
    return generation.finished[0]


def _report(finished: Finished) -> str:
    timing, speculation, num_tokens = finished.timing, finished.speculation, finished.usage.completion_tokens
    per_token_ms = 1000 * timing.decode_seconds / max(1, num_tokens - 1)
    share = speculation.num_accepted_draft_tokens / max(1, speculation.num_draft_tokens)
    return "\n".join(
        (
            f"prompt                 {finished.usage.prompt_tokens} tokens",
            f"answer                 {num_tokens} tokens, ended by {finished.finish_reason}",
            f"time to first token    {1000 * timing.time_to_first_token_seconds:.1f} ms",
            f"time per output token  {per_token_ms:.1f} ms",
            f"throughput             {num_tokens / timing.total_seconds:.1f} tokens/s",
            f"drafts proposed        {speculation.num_draft_tokens}",
            f"drafts accepted        {speculation.num_accepted_draft_tokens} ({share:.0%})",
        )
    )
