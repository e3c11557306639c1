"""LMCache's server, as an operator runs it, in a process of its own that can be killed, stopped and started again."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from connectors.lmcache.package import import_lmcache

START_TIMEOUT_S = 90.0
ANSWER_TIMEOUT_S = 20.0


class LMCacheProcess:
    """The server with a pool of 128 MiB in shared memory.

    Attributes:
        port: of its calls.
        pool: the file of its memory.
    """

    def __init__(self, log: Path, chunk_size: int = 256) -> None:
        """Args: log: where to write what it says."""
        self.port, self._http_port = _free_port(), _free_port()
        self.pool = Path(f"/dev/shm/lmcache_l1_pool_outrider-test-{os.getpid()}-{self.port}")
        self._log = log
        self._chunk_size = chunk_size
        import_lmcache()
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._client: Any = RequestClientFactory.create(f"tcp://127.0.0.1:{self.port}")
        self.start()

    def start(self) -> None:
        """At the same address as before; returns once it answers."""
        command = "import sys; from lmcache.cli.main import main; sys.exit(main())"
        arguments = {
            "--host": "127.0.0.1",
            "--port": self.port,
            "--http-host": "127.0.0.1",
            "--http-port": self._http_port,
            "--l1-size-gb": 0.125,
            "--chunk-size": self._chunk_size,
            "--eviction-policy": "LRU",
            "--supported-transfer-mode": "engine_driven",
            "--shm-name": self.pool.name,
        }
        flags = ["--no-l1-use-lazy", *(str(item) for pair in arguments.items() for item in pair)]
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", command, "server", *flags], stdout=log, stderr=log, env=environment
            )
        if not self._client.noop().wait(START_TIMEOUT_S):
            self.kill()
            raise TimeoutError(self._log.read_text()[-3000:])

    def clear(self) -> None:
        """Drop everything that it holds."""
        self._client.clear(True).result(timeout=ANSWER_TIMEOUT_S)

    def forget(self, instance_id: int) -> None:
        """End a registration, as the server does after silence."""
        self._client.unregister_kv_cache_engine_driven_context(instance_id).result(timeout=ANSWER_TIMEOUT_S)

    def memory_status(self) -> dict[str, Any]:
        """What it says of its memory: total_object_count, read_locked_count, write_locked_count, ..."""
        status: dict[str, Any] = self._status()["storage_manager"]["l1_managers"]["_default"]
        return status

    def num_sessions(self) -> int:
        """Sessions that have not ended."""
        return int(self._status()["active_sessions"])

    def stop(self) -> None:
        """Have it hang."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Have it hang no more."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it without a chance to say so."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it for good."""
        self.kill()
        self._client.close()
        self.pool.unlink(missing_ok=True)

    def _status(self) -> dict[str, Any]:
        until_s = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            try:
                with urlopen(f"http://127.0.0.1:{self._http_port}/status", timeout=ANSWER_TIMEOUT_S) as answer:
                    status: dict[str, Any] = json.load(answer)
                    return status
            except URLError:  # it listens there a moment after it answers calls
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
