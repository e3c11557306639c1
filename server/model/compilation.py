"""Compiles what runs often, in a process of its own, and lets its owner use it."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from server.errors import ModelError
from server.model.cache import cache_root

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""How long compiled layers wait for a moment without requests before admission is held for them."""


class Order(Protocol):
    """What is to be compiled."""

    @property
    def module(self) -> str:
        """Whose process makes it: `python -m MODULE ORDER FOLDER`."""

    @property
    def what(self) -> str:
        """What is compiled, for the log."""

    @property
    def digest(self) -> str:
        """Equal for orders whose result is the same."""

    def to_json(self) -> str:
        """For the command line of the process."""


class Compilation:
    """Compiled code for one model: on the disk already, or in the making.

    Requests whose answers have begun are never changed over: rounding differs a little.
    """

    def __init__(self, order: Order, when: Literal["auto", "wait"], install: Callable[[Path], None]) -> None:
        """Args: install: has the folder's code used; raises ModelError where it cannot be."""
        self._order = order
        self._waits = when == "wait"
        self._install_from = install
        self._folder: Path = cache_root() / "layers" / order.digest
        self._process: subprocess.Popen[str] | None = None
        self._is_cancelled = False
        self._lock = threading.Lock()

    def prepare(self, run_when_quiet: Callable[[Callable[[], None], float], None]) -> None:
        """Use what is on the disk; otherwise compile it, now or on the side. Called on the step thread, before serving.

        Args: run_when_quiet: (action, patience in seconds); see StepLoop.run_when_quiet.
        """
        if self._folder.is_dir() or (self._waits and self._compile()):
            try:
                self._install()
            except ModelError as error:
                logger.warning("%s", error)
        elif not self._waits:

            def work() -> None:
                if self._compile():
                    run_when_quiet(self._install, PATIENCE_S)

            threading.Thread(target=work, name="outrider-compile", daemon=True).start()

    def cancel(self) -> None:
        """Give up compiling, if it still goes on; may be called twice, from any thread."""
        with self._lock:
            self._is_cancelled = True
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGTERM)  # with the C++ compiler that it waits for

    def _install(self) -> None:
        self._install_from(self._folder)
        logger.info("%s run compiled: %s", self._order.what, self._folder)

    def _compile(self) -> bool:
        """Make the packages, in tens of seconds. Returns: whether they are there; if not, the log says why."""
        logger.info("compiling %s%s", self._order.what, "" if self._waits else " on the side")
        started = time.monotonic()
        command = [sys.executable, "-m", self._order.module, self._order.to_json(), str(self._folder)]
        with self._lock:
            if self._is_cancelled:
                return False
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,
            )
        with self._process as process:
            assert process.stderr is not None
            errors = process.stderr.read()  # with standard input open: the process ends when that closes
        if self._is_cancelled:
            return False
        if process.returncode != 0:
            reason = errors.strip().rsplit("\n", 1)[-1] or f"exit code {process.returncode}"
            logger.warning("%s cannot be compiled, and run as they are: %s", self._order.what, reason)
            return False
        logger.info("compiled %s in %.0f s", self._order.what, time.monotonic() - started)
        return True
