"""`outrider serve` in a process of its own, which can be killed, stopped and started again at its address."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from clients.errors import DeadlineExceededError
from clients.sync import Client
from server.commands.bench_disaggregated_process import free_port
from server.commands.own_module import module_command
from tests.fakes.device import DEVICE, PREFILL_DEVICE
from tests.fakes.served_model import SETTINGS

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.5


class ServerProcess:
    """That process; it serves once `wait_ready` has returned.

    Attributes:
        target: where it answers, from one start to the next.
    """

    def __init__(self, folder: Path, *, wrapper: Sequence[str] = (), **settings: object) -> None:
        """Args:
        folder: made for its settings and its log.
        wrapper: a command that the server's is an argument of.
        settings: those of `outrider serve`, besides those that all tests have; `model` is needed.
        """
        folder.mkdir(parents=True)
        port = free_port()
        self.target = f"127.0.0.1:{port}"
        self._log = folder / "log"
        path = folder / "settings.yaml"
        device = PREFILL_DEVICE if settings.get("role") == "prefill" else DEVICE
        ours = {"device": device, "speculative_config": None}
        values = {**SETTINGS, **ours, **settings, "host": "127.0.0.1", "port": port}
        path.write_text(json.dumps(values, default=str), encoding="utf-8")  # JSON is YAML
        command, self._environment = module_command("server", "serve", "--config", str(path))
        self._command = [*wrapper, *command]
        self.start()

    def start(self) -> None:
        """Begin to, at the same address as before."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
        environment = {**ours, **self._environment, "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    def wait_ready(self) -> None:
        """Wait until it serves. Raises: TimeoutError, or AssertionError if it has ended, with what it has logged."""
        until_s = time.monotonic() + START_TIMEOUT_S
        with Client(self.target) as client:
            while True:
                with contextlib.suppress(DeadlineExceededError):
                    return client.wait_ready(timeout_s=POLL_S)
                assert self._process.poll() is None, self.log
                if time.monotonic() > until_s:
                    raise TimeoutError(self.log)

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def signal(self, number: int) -> None:
        """Send it a signal; one that ends it has ended it then, which takes a while where it has a GPU."""
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()

    def kill(self) -> None:
        """End it without a chance to say so."""
        self.signal(signal.SIGKILL)

    def revive(self) -> None:
        """Have it serve again, whatever was done to it."""
        if self._process.poll() is None:
            self.signal(signal.SIGCONT)
        else:
            self.start()
        self.wait_ready()

    def stop(self) -> None:
        """Ask it to end, as an operator does, in whatever state it is."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()

    def close(self) -> None:
        """End it."""
        self.stop()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()


@contextmanager
def server_processes(folder: Path, settings: Mapping[str, Mapping[str, object]]) -> Iterator[dict[str, ServerProcess]]:
    """Servers by their names, all of which serve, until the block ends. Args: folder: for what each of them writes."""
    servers: dict[str, ServerProcess] = {}
    try:
        for name, values in settings.items():
            servers[name] = ServerProcess(folder / name, **values)  # type: ignore[arg-type]
        for server in servers.values():
            server.wait_ready()
        yield servers
    finally:
        for server in servers.values():  # all at once, rather than each when the one before it has ended
            server.stop()
        for server in servers.values():
            server.close()
