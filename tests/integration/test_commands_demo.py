"""`outrider demo` from its start to its report: a real server process, model, client and speculation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_model import build_tiny_model

ROOT = Path(__file__).resolve().parents[2]


def _demo(*arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "server", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.full
def test_demo_answers_and_reports(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "tiny")
    done = _demo(
        str(model), "--dtype", "float32", "--max-tokens", "24", "--kv-cache-memory-bytes", "16MiB", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    report = dict(line.split("  ", 1) for line in done.stdout.split("\n\n")[-1].splitlines())
    assert list(report) == [
        "prompt",
        "answer",
        "time to first token",
        "time per output token",
        "throughput",
        "drafts proposed",
        "drafts accepted",
    ]
    assert report["answer"].split()[0].isdigit()


@pytest.mark.full
def test_demo_says_why_its_server_did_not_start(tmp_path: Path) -> None:
    done = _demo(str(tmp_path))
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr
    assert done.stderr.rstrip().endswith("the server did not start; it says why above")


def test_demo_has_no_address_of_the_users() -> None:
    done = _demo("--port", "50051")
    assert done.returncode == 2
    assert "--port" in done.stderr
