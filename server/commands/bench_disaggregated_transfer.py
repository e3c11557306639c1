"""How fast each connector moves blocks between two processes, and what that costs, against the least it could cost."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.commands.bench_disaggregated_connectors import Setup
from server.commands.bench_disaggregated_cores import Cores
from server.commands.bench_disaggregated_load import MAX_BLOCKS, PEERS, Load
from server.commands.bench_disaggregated_process import LoggedProcess
from server.commands.own_module import module_command
from server.errors import OutriderError

PLAIN, COPY = "plain socket", "memory copy"
_SIDE = "server.commands.bench_disaggregated_side"


@dataclass(frozen=True, slots=True)
class Timing:
    """One pass over all blocks.

    Attributes:
        sender_cpu_s, receiver_cpu_s: processor time of the side that has the blocks, and of the one that wants them;
            where both are one process, the second is 0.
        server_cpu_s: of the connector's own server, if it has one.
    """

    nbytes: int
    wall_s: float
    sender_cpu_s: float
    receiver_cpu_s: float
    server_cpu_s: float = 0.0

    @property
    def gb_per_s(self) -> float:
        """Gigabytes, of 10^9 bytes."""
        return self.nbytes / self.wall_s / 1e9


Timings = dict[str, list[Timing]]
"""By way, in turns."""


class _SideProcess:
    """A process of `bench_disaggregated_side`."""

    def __init__(self, name: str, settings: dict[str, Any], folder: Path, cores: Sequence[int]) -> None:
        command, environ = module_command(_SIDE, json.dumps(settings))
        self._process = LoggedProcess(name, command, folder, cores, environ=environ, pipes=True)

    def order(self, do: str, **arguments: object) -> None:
        """Begin something. Raises: OutriderError if the process has ended."""
        assert self._process.popen.stdin is not None
        try:
            print(json.dumps({"do": do, **arguments}), file=self._process.popen.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> Any:
        """What came of it: value and cpu_s. Raises: OutriderError if the process has ended."""
        assert self._process.popen.stdout is not None
        line = self._process.popen.stdout.readline()
        if not line:
            raise self._ended()
        return json.loads(line)

    def ask(self, do: str, **arguments: object) -> Any:
        """Both. Returns: the value."""
        self.order(do, **arguments)
        return self.answer()["value"]

    def cpu_s(self) -> float:
        """Processor time so far."""
        self.order("rest")
        return float(self.answer()["cpu_s"])

    def close(self) -> None:
        """End it."""
        self._process.close()

    def _ended(self) -> OutriderError:
        self._process.popen.wait()
        return self._process.failure(f"ended with exit code {self._process.popen.returncode}")


class _Pair:
    """Both sides of a connector."""

    def __init__(self, setup: Setup, sender: _SideProcess, receiver: _SideProcess, nbytes: int) -> None:
        self._setup = setup
        self._sender = sender
        self._receiver = receiver
        self._nbytes = nbytes
        self._num_texts = 0

    @contextmanager
    def _timed(self, into: list[Timing]) -> Iterator[list[float]]:
        """Adds what happens within the context, whose wall time it is to append to the list."""
        before = self._cpu_s()
        wall_s: list[float] = []
        yield wall_s
        used_s = [late - early for early, late in zip(before, self._cpu_s(), strict=True)]
        into.append(Timing(self._nbytes, wall_s[0], *used_s))

    def _cpu_s(self) -> tuple[float, float, float]:
        """Processor time so far of sender, receiver and server."""
        receiver_s = 0.0 if self._receiver is self._sender else self._receiver.cpu_s()
        return self._sender.cpu_s(), receiver_s, 0.0 if self._setup.server is None else self._setup.server.cpu_s

    def connect(self) -> None:
        """Open the plain socket, which stays open as the connector's does."""
        port = self._sender.ask("listen")
        self._sender.order("accept")
        self._receiver.ask("connect", port=port)
        self._sender.answer()

    def plain(self, found: Timings) -> None:
        """Over a plain socket, without checksums."""
        with self._timed(found.setdefault(PLAIN, [])) as wall_s:
            self._sender.order("send")
            wall_s.append(self._receiver.ask("receive"))
            self._sender.answer()

    def copy(self, found: Timings) -> None:
        """Within a process."""
        with self._timed(found.setdefault(COPY, [])) as wall_s:
            wall_s.append(self._receiver.ask("copy"))

    def through(self, found: Timings) -> None:
        """From the sender into the store and from there to the receiver, or straight from the one to the other."""
        self._num_texts += 1
        text, handle = f"{self._num_texts}", None
        if self._setup.name in PEERS:
            handle = self._sender.ask("hand_on", text=text)
        else:
            with self._timed(found.setdefault("save", [])) as wall_s:
                wall_s.append(self._sender.ask("save", text=text))
        with self._timed(found.setdefault("load", [])) as wall_s:
            wall_s.append(self._receiver.ask("load", text=text, handle=handle))


def measure_transfer(load: Load, cores: Cores, setup: Setup, block_kib: int, folder: Path, found: Timings) -> None:
    """All ways by turns, one time forwards and the next time backwards; the first turn does not count.

    The receiver's blocks are filled; a store is asked for what it was given just before.

    Args: found: turns that count are added as they end.
    Raises: OutriderError if blocks are not moved.
    """
    block_nbytes = block_kib << 10
    num_blocks = min(MAX_BLOCKS, max(1, (load.mib << 20) // block_nbytes))
    choice = setup.choice
    if setup.name == "memory":
        choice = {**choice, "kv_connector_extra_config": {"max_bytes": 2 * num_blocks * block_nbytes}}
    settings: dict[str, Any] = {"choice": choice, "num_blocks": num_blocks, "block_nbytes": block_nbytes}
    with ExitStack() as stack:
        sender = _SideProcess(f"{setup.name} sender", {**settings, "engine_id": "sender"}, folder, cores.prefill)
        stack.callback(sender.close)
        receiver = sender
        if setup.name != "memory":  # whose blocks are of one process
            receiver = _SideProcess(
                f"{setup.name} receiver", {**settings, "engine_id": "receiver"}, folder, cores.decode
            )
            stack.callback(receiver.close)
        pair = _Pair(setup, sender, receiver, num_blocks * block_nbytes)
        ways = [pair.copy, pair.through]
        if receiver is not sender:
            pair.connect()
            ways.insert(1, pair.plain)
        for turn in range(load.turns["transfer"] + 1):
            timings: Timings = {}
            for way in ways if turn % 2 else reversed(ways):
                way(timings)
            if turn:
                for what, timed in timings.items():
                    found.setdefault(what, []).extend(timed)
