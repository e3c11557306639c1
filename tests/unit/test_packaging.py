"""The two distributions agree."""

import tomllib
from pathlib import Path
from typing import Any

from server.version import VERSION

ROOT = Path(__file__).resolve().parents[2]


def _project(folder: str) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def test_versions_agree() -> None:
    assert _project("packages/client")["version"] == VERSION


def test_client_needs_a_part_of_what_the_server_needs() -> None:
    client, server = _project("packages/client")["dependencies"], _project(".")["dependencies"]
    assert set(client) < set(server)
    assert [requirement.partition(">=")[0] for requirement in client] == ["grpcio", "grpcio-status", "protobuf"]
