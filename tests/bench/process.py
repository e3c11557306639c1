"""Processes that stand still while another one is measured."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_STOP_TIMEOUT_S = 30.0
_LOG_TAIL_CHARS = 3000


class BenchError(Exception):
    """A process did not do what it was started for; the message holds the end of its log."""


class Process:
    """A command and all its children, as a process group; what it says goes to a log file."""

    def __init__(self, command: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
        self._log = log
        with log.open("wb") as file:
            self.popen = subprocess.Popen(
                command,
                env={**os.environ, **environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )

    def pause(self) -> None:
        """Stop every process of the group: an idle engine may spin, or wake for housekeeping."""
        os.killpg(self.popen.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        os.killpg(self.popen.pid, signal.SIGCONT)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let them go on for as long as the block takes."""
        self.resume()
        try:
            yield
        finally:
            if self.popen.poll() is None:
                self.pause()

    def close(self) -> None:
        """Ask the command to end, then kill what is left of the group."""
        if self.popen.poll() is None:
            self.resume()
            self.popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(_STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.communicate()

    def failure(self, what: str) -> BenchError:
        """An error that shows what the command said last."""
        said = self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL_CHARS:]
        return BenchError(f"{what} (exit code {self.popen.poll()}); its log ends with:\n{said}")
