"""`outrider bench disaggregated`: real processes, on the tiny model."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from clients.measurements import Measurements
from clients.mixed_load import MixedResult
from server.cli import EXIT_INTERRUPTED, main
from server.commands import bench_disaggregated
from server.commands.bench_disaggregated_connectors import Setup
from server.commands.bench_disaggregated_frontier import SHARED, Turn
from server.commands.bench_disaggregated_load import LONG, STREAM
from server.commands.bench_disaggregated_node import Starter
from server.commands.bench_disaggregated_transfer import COPY, PLAIN, Timing, Timings
from server.errors import OutriderError
from tests.tiny_model import build_tiny_model

SMALL = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "16", "--compile", "none")
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each of two nodes needs a core")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("tiny")))


def bench(*arguments: str) -> int:
    return main(["bench", "disaggregated", *SMALL, *arguments])


def run_and_read(output: Path, *arguments: str) -> dict[str, Any]:
    assert bench(*arguments, "--output", str(output)) == 0
    report: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return report


@pytest.mark.full
@pytest.mark.timeout(600)
@needs_two_cores
def test_one_run_measures_all_of_it(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_and_read(
        *(tmp_path / "report.json", model, "--budgets", "32", "--rates", "1", "--burst-size", "1", "--repeat", "1"),
        *("--prompt-len", "200", "--output-len", "4", "--stream-rate", "3", "--stream-output-len", "8"),
        *("--duration", "2", "--connectors", "filesystem,memory", "--block-kib", "64", "--mib", "1"),
    )
    assert set(report) >= {"command", "commit", "time", "versions", "host", "cores", "load", "settings", "goals"}
    assert report["is_complete"]
    assert set(report["cores"]["prefill"]).isdisjoint(report["cores"]["decode"])
    (rate,) = report["frontier"]["rates"]
    assert [setup["name"] for setup in rate["setups"]] == ["budget 32", "1 prefill + 1 decode"]
    for setup in rate["setups"]:
        (turn,) = setup["turns"]
        assert turn["long"]["requests"] == {"completed": 2, "failed": 0, "failed_by_status": {}}
        assert turn["long"]["tokens"]["output"] == 8
        assert turn["long"]["tokens"]["cached"] == 0, "no prompt is sent twice"
        assert turn["stream"]["requests"]["failed"] == 0
        assert setup["gap_p99_s"]["median"] > 0
        assert setup["second_token_p50_s"]["median"] > 0
    assert [setup["turns"][0]["loaded_share"] for setup in rate["setups"]] == [None, 1.0]
    assert rate["verdict"]["best"]["name"] == "budget 32"
    assert "reached" in report["frontier"]["crossover"]

    for cell, name in zip(report["ttft"], ("filesystem", "memory"), strict=True):
        assert cell["connector"] == name
        assert cell["found_tokens"]["median"] == 192, "all full blocks of the prompt"
        assert cell["recomputed_s"]["median"] > 0

    filesystem, memory = report["transfer"]
    assert set(filesystem["ways"]) == {"memory copy", "plain socket", "save", "load"}
    assert set(memory["ways"]) == {"memory copy", "save", "load"}

    printed = capsys.readouterr().out
    assert printed.count("1 prefill + 1 decode") == 2, "in the table and in the verdict"
    assert "crossover: " in printed


@needs_two_cores
def test_blocks_go_from_process_to_process(model: str, tmp_path: Path) -> None:
    report = run_and_read(
        *(tmp_path / "report.json", model, "--parts", "transfer", "--connectors", "tcp", "--block-kib", "64"),
        *("--mib", "1", "--repeat", "2"),
    )
    assert "frontier" not in report
    (cell,) = report["transfer"]
    assert (cell["connector"], cell["block_kib"]) == ("tcp", 64)
    for way in cell["ways"].values():
        assert len(way["gb_per_s"]["all"]) == 2
        assert min(way["gb_per_s"]["all"]) > 0
    load = cell["ways"]["load"]
    assert load["sender_cpu_s_per_gb"]["median"] > 0
    assert load["receiver_cpu_s_per_gb"]["median"] > 0


@needs_two_cores
def test_what_is_interrupted_tells_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        *_, found = args
        for way in (PLAIN, "load"):
            found[way] = [Timing(10**9, 0.5, 0.1, 0.2)] * 2
        found[COPY] = [Timing(10**9, 0.1, 0.0, 0.1)] * 2
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_disaggregated, "measure_transfer", interrupted)
    output = tmp_path / "report.json"
    assert bench("--parts", "transfer", "--connectors", "tcp", "--output", str(output)) == EXIT_INTERRUPTED
    assert "2.00 (2.00-2.00)" in capsys.readouterr().out
    report = json.loads(output.read_text(encoding="utf-8"))
    assert not report["is_complete"]
    assert report["transfer"][0]["ways"]["load"]["gb_per_s"]["all"] == [2.0, 2.0]


@needs_two_cores
def test_a_connector_that_fails_leaves_the_others_to_be_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(load: object, cores: object, setup: Setup, block_kib: int, folder: Path, found: Timings) -> None:
        if setup.name == "tcp":
            raise OutriderError("252 of 256 blocks were found")
        found[COPY] = found["load"] = [Timing(10**9, 0.1, 0.0, 0.1)] * 2

    monkeypatch.setattr(bench_disaggregated, "measure_transfer", measured)
    output = tmp_path / "report.json"
    arguments = "--parts", "transfer", "--connectors", "tcp,memory", "--block-kib", "64", "--output", str(output)
    assert bench(*arguments) == 1
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["failures"] == ["transfer, tcp, blocks of 64 KiB: 252 of 256 blocks were found"]
    assert not report["is_complete"]
    assert [cell["connector"] for cell in report["transfer"]] == ["memory"]
    assert f"outrider: {report['failures'][0]}" in capsys.readouterr().err


@needs_two_cores
@pytest.mark.parametrize("measured", [(), ("budget 32",), ("budget 32", SHARED)])
def test_a_frontier_that_is_interrupted_has_a_verdict_if_it_has_both_sides(
    measured: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def interrupted(*args: Any) -> None:
        *_, found = args
        for name in measured:
            by_kind = {kind: Measurements() for kind in (STREAM, LONG)}
            for measurements in by_kind.values():
                measurements.ttft.add(0.1)
                measurements.record_gap(0.01, 1, is_first=True)
            found[0.2][name].append(Turn(MixedResult(by_kind, 1.0, 0.1), None))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_disaggregated, "measure_frontier", interrupted)
    output = tmp_path / "report.json"
    assert bench("--parts", "frontier", "--output", str(output)) == EXIT_INTERRUPTED
    (rate,) = json.loads(output.read_text(encoding="utf-8"))["frontier"]["rates"]
    assert [setup["name"] for setup in rate["setups"]] == list(measured)
    printed = capsys.readouterr().out
    assert ("crossover" in printed, rate["verdict"] is not None) == (len(measured) == 2,) * 2
    assert all(name in printed for name in measured)


@needs_two_cores
def test_a_server_that_does_not_start_is_named_with_its_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(str(tmp_path / "nothing"), "--parts", "frontier", "--budgets", "32") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("outrider: probe ended with exit code 1: ")
    assert str(tmp_path / "nothing") in error


@pytest.mark.full
@needs_two_cores
async def test_of_a_pair_of_servers_neither_stays_if_one_does_not_start(model: str, tmp_path: Path) -> None:
    """Only the prefill node needs the port, which is taken."""
    one, other, *_ = sorted(os.sched_getaffinity(0))
    settings = {"model": model, "device": "cpu", "compile": "none", "kv_cache_memory_bytes": "4MiB"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        choice = {"kv_connector": "tcp", "kv_connector_extra_config": {"port": taken.getsockname()[1]}}
        with pytest.raises(OutriderError, match="prefill ended with exit code"):
            async with Starter(settings, tmp_path, 60.0).pair([one], [other], kv_transfer_config=choice):
                pytest.fail("a pair without a prefill node")
    assert (tmp_path / "decode.log").read_text().rstrip().endswith("stopped")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parts", "all"), "--parts: must be one of frontier, ttft, transfer, got 'all'"),
        (("--rates", "0"), "--rates: must be a number per second above 0, got '0'"),
        (("--rates", "0.01"), "--rates: at 0.01 prompts/s in bursts of 2 the first one comes after 100 s"),
        (("--hop-connector", "memory"), "--hop-connector: must be one of filesystem, tcp, lmcache, nixl"),
        (("--cores", "100000"), "--cores: this process may not use 100000"),
        (("--budgets", "8"), "--budgets: 8 is less than --max-num-seqs, 16"),
        (("--max-num-batched-tokens", "64"), "max_num_batched_tokens: is what is measured"),
        (("--kv-cache-memory-bytes", "1GiB"), "kv_cache_memory_bytes: is what is measured; give --prompt-len and"),
        (("--kv-transfer-config", '{"kv_connector": "tcp"}'), "kv_transfer_config: is what is measured"),
        (("--storage", "/nowhere"), "--storage: there is no folder /nowhere"),
    ],
)
@needs_two_cores
def test_wrong_arguments_are_one_line_and_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--parts", "frontier", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.strip().splitlines()[-1].startswith("outrider")
