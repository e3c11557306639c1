"""The paired benchmark with real processes on the tiny model; our offline API stands for the peers."""

import json
import sys
from pathlib import Path

import pytest

from tests.bench.contestants import Worker
from tests.bench.peers import main
from tests.bench.process import BenchError
from tests.tiny_model import build_tiny_model

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def test_a_report_has_both_sides_and_the_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report.json"
    main(
        [
            *("--model", str(build_tiny_model(tmp_path / "tiny")), "--offline", "--starts", "1", "--pairs", "2"),
            *("--input-len", "12", "--output-len", "6", "--output", str(output), "--logs", str(tmp_path / "logs")),
            *("--serve-args", "--device cpu --dtype float32 --kv-cache-memory-bytes 4MiB"),
        ]
    )
    report = json.loads(output.read_text(encoding="utf-8"))
    (contest,) = report["contests"]
    (row,) = contest["rows"]
    assert contest["versions"]["outrider"]
    assert row["workload"] == {"batch": 64, "input_len": 12, "output_len": 6}
    assert [[side["num_tokens"] for side in pair] for pair in row["pairs"]] == [[384, 384]] * 2
    assert row["decode_ratio"]["low"] <= row["decode_ratio"]["median"] <= row["decode_ratio"]["high"]
    assert row["pairs"][0][0]["client_cpu_s"] > 0
    assert row["pairs"][0][1]["client_cpu_s"] is None
    assert len(report["starts"]["cold_s"]) == len(report["starts"]["warm_s"]) == 1
    assert "against outrider offline" in capsys.readouterr().out


def test_a_process_that_fails_is_an_error_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"(?s)the worker ended.*there is no folder or file"):
        Worker(sys.executable, "outrider", "/no/such/model", {}, tmp_path / "log")
