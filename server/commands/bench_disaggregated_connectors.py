"""Connectors as `outrider bench disaggregated` sets them up."""

import importlib.util
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from server.commands.bench_disaggregated_load import CONNECTORS
from server.commands.bench_disaggregated_process import LoggedProcess, free_port
from server.errors import ConfigError

_PACKAGES: Mapping[str, str] = {"lmcache": "lmcache", "nixl": "nixl"}
_LMCACHE_GB = 4
"""More than the turns of a transfer fill: while it evicts, it keeps nothing."""
_SHARED_MEMORY = Path("/dev/shm")
_START_TIMEOUT_S = 120.0
_POLL_S = 0.2
_TIMEOUT_S = 60.0
"""Of a transfer; the machine may be busy, and a transfer that is given up measures nothing."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A connector and, if it needs one, its server.

    Attributes: choice: for kv_transfer_config.
    """

    name: str
    choice: Mapping[str, Any]
    server: LoggedProcess | None = None


def chosen_connectors(names: Sequence[str] | None) -> list[str]:
    """Those that are installed, if none are named. Raises: ConfigError for one that is named and not installed."""
    missing = {name for name, package in _PACKAGES.items() if importlib.util.find_spec(package) is None}
    if names is None:
        return [name for name in CONNECTORS if name not in missing]
    for name in names:
        if name in missing:
            raise ConfigError(f"--connectors: {name} is not installed: pip install 'outrider[{name}]'")
    return list(names)


@contextmanager
def set_up(name: str, folder: Path, storage: Path, cores: Sequence[int]) -> Iterator[Setup]:
    """A connector with nothing in it, ready to be used until the block ends.

    Args:
        folder: for logs. storage: where a folder for blocks may be made.
        cores: of a server that it needs.
    """
    with ExitStack() as stack:
        settings: dict[str, object] = {}
        server = None
        if name == "filesystem":
            blocks = storage / "blocks"
            stack.callback(shutil.rmtree, blocks, ignore_errors=True)
            settings = {"shared_storage_path": str(blocks)}
        elif name == "lmcache":
            port = free_port()
            server = stack.enter_context(_lmcache_server(port, folder, cores))
            settings = {"port": port, "request_timeout_seconds": _TIMEOUT_S}
        elif name != "memory":
            settings = {"transfer_timeout_seconds": _TIMEOUT_S}
        yield Setup(name, {"kv_connector": name, "kv_connector_extra_config": settings}, server)


@contextmanager
def _lmcache_server(port: int, folder: Path, cores: Sequence[int]) -> Iterator[LoggedProcess]:
    """LMCache's server with its memory shared, as the connector needs it. Raises: OutriderError."""
    pool, http_port = _SHARED_MEMORY / f"lmcache_l1_pool_outrider-bench-{port}", free_port()
    flags = {
        "host": "127.0.0.1",
        "port": port,
        "http-host": "127.0.0.1",
        "http-port": http_port,
        "l1-size-gb": _LMCACHE_GB,
        "eviction-policy": "LRU",
        "supported-transfer-mode": "engine_driven",
        "shm-name": pool.name,
    }
    code = "import sys; from lmcache.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "server"]
    command += ["--no-l1-use-lazy"]  # its memory is there before it is measured
    command += [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
    process = LoggedProcess("lmcache", command, folder, cores, environ={"LMCACHE_TRACK_USAGE": "false"})
    try:
        _wait_for_page(process, f"http://127.0.0.1:{http_port}/status")
        yield process
    finally:
        process.close()
        pool.unlink(missing_ok=True)


def _wait_for_page(process: LoggedProcess, url: str) -> None:
    until_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        process.check_alive()
        try:
            with urlopen(url, timeout=_POLL_S):
                return
        except OSError:
            if time.monotonic() > until_s:
                raise process.failure(f"did not answer within {_START_TIMEOUT_S:g} s") from None
            time.sleep(_POLL_S)
