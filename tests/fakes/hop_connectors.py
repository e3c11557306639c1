"""Connectors that KV can go from one server process to another by."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def _needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


CONNECTORS = [
    "filesystem",
    pytest.param("lmcache", marks=_needs("lmcache")),
    "tcp",
    pytest.param("nixl", marks=_needs("nixl")),
]
"""Parameters of a fixture."""
PEERS = ["tcp", pytest.param("nixl", marks=_needs("nixl"))]
"""Those of them that have no store."""


def kv_transfer(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """What `kv_transfer_config` says of the connector that a fixture has as its parameter; if a store, it is empty.

    Args: folder: for a store of files.
    """
    extra: dict[str, Any] = {"transfer_timeout_seconds": 20.0}  # a machine that is busy is no node that hangs
    if request.param == "filesystem":
        extra = {"shared_storage_path": str(folder / "blocks")}
    elif request.param == "lmcache":
        server = request.getfixturevalue("lmcache_process")
        server.clear()
        extra = {"port": server.port, "request_timeout_seconds": 20.0}
    return {"kv_connector": request.param, "kv_connector_extra_config": extra}
