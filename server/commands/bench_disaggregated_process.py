"""Processes that `outrider bench disaggregated` starts: each on cores of its own, with a log."""

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from server.errors import OutriderError

_STOP_TIMEOUT_S = 30.0
_STAT_UTIME, _STAT_STIME = 11, 12
"""Places of a process's times in /proc/PID/stat, counted behind its name."""

_given_ports: set[int] = set()


class LoggedProcess:
    """A command, and what it says in a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        cores: Sequence[int],
        *,
        environ: Mapping[str, str] | None = None,
        hidden_prefix: str | None = None,
        pipes: bool = False,
    ) -> None:
        """Args:
        name: for messages. folder: for its log.
        environ: variables besides ours. hidden_prefix: of variables of ours that it does not get.
        pipes: whether its standard input and output are talked to.
        """
        self.name = name
        self._log = folder / f"{name.replace(' ', '-')}.log"
        ours = {
            key: value for key, value in os.environ.items() if not (hidden_prefix and key.startswith(hidden_prefix))
        }
        with self._log.open("ab") as log, on_cores(cores):
            self.popen = subprocess.Popen(
                command,
                env={**ours, **(environ or {})},
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else log,
                stderr=log,
                text=True,
            )

    def check_alive(self) -> None:
        """Raises: OutriderError with the last line of the log, if it has ended."""
        if self.popen.poll() is not None:
            raise self.failure(f"ended with exit code {self.popen.returncode}")

    def failure(self, what: str) -> OutriderError:
        """The error of a process that did not do what it was started for."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return OutriderError(f"{self.name} {what}: {lines[-1] if lines else 'it has logged nothing'}")

    @property
    def cpu_s(self) -> float:
        """Processor time that it has used so far."""
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[_STAT_UTIME]) + int(fields[_STAT_STIME])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Ask it to end, by the end of its input if it has one; kill it if it does not."""
        if self.popen.stdin is None:
            self.popen.terminate()
        else:
            with suppress(BrokenPipeError):
                self.popen.stdin.close()
        try:
            self.popen.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        if self.popen.stdout is not None:
            self.popen.stdout.close()


def free_port() -> int:
    """A TCP port of this machine that nobody listens at, a new one each time: who got one may not listen yet."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port not in _given_ports:
            _given_ports.add(port)
            return port


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """This thread, and what it starts, runs on these cores within the context."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
