"""What a measurement is worth nothing without: command, commit, versions, device."""

import datetime as dt
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from google.protobuf.json_format import MessageToDict

from protos.outrider.v1 import inference_pb2 as pb
from server.version import VERSION

_ROOT = Path(__file__).resolve().parents[2]


def describe_run(libraries: Iterable[str]) -> dict[str, object]:
    """Command, time, commit and versions as JSON values; the commit is None outside git.

    Args:
        libraries: distributions whose versions matter; null is the version of one that is not installed.
    """
    return {
        "command": shlex.join(sys.argv),
        "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {
            "outrider": VERSION,
            "python": platform.python_version(),
            **{name: _version(name) for name in libraries},
        },
    }


def describe_host() -> dict[str, object]:
    """The machine that this process is on."""
    return {"platform": platform.platform(), "cpus": os.cpu_count()}


def describe_environment(model: pb.GetModelInfoResponse) -> dict[str, object]:
    """Both ends of a run over gRPC as JSON values; the commit is the client's."""
    return {
        **describe_run(("grpcio", "protobuf")),
        "client_host": describe_host(),
        "server": MessageToDict(model, preserving_proto_field_name=True, always_print_fields_with_no_presence=True),
        "device": model.device,
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit that this file is of, marked where files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
