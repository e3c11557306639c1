"""`outrider bench serve`, from its arguments to its report."""

import asyncio
import json
from pathlib import Path

import pytest

from server.cli import main
from tests.fakes.scripted_server import ScriptedServer, running_script


async def run_command(*arguments: str) -> int:
    """The command in a thread, as it runs an event loop of its own."""
    return await asyncio.to_thread(main, ["bench", "serve", *arguments])


async def test_the_report_says_what_was_run_where_and_how_it_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report.json"
    async with running_script(ScriptedServer(bursts=(1, 3), pause_s=0.001)) as script:
        code = await run_command(
            *("--target", script.address, "--num-prompts", "8", "--max-concurrency", "2", "--output", str(output)),
            *("--random-input-len", "16", "--random-output-len", "4", "--prefix-len", "4"),
            *("--goodput", "ttft_ms:60000,tpot_ms:60000", "--ignore-eos"),
        )
    assert code == 0
    assert {len(request.token_ids.ids) for request in script.requests} == {20}
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["requests"] == {"completed": 8, "failed": 0, "failed_by_status": {}}
    assert report["device"] == "cpu"
    assert report["server"]["version"] == "9.9"
    assert report["load"]["request_rate"] is None
    assert report["load"]["max_concurrency"] == 2
    assert report["goodput"]["share"] == 1
    assert report["speculation"]["acceptance_rate"] == 0.75
    assert report["client_cpu"]["cpu_s"] > 0
    assert report["versions"]["grpcio"]
    assert set(report) >= {"command", "commit", "time", "duration_s", "throughput"}
    for name in ("time_to_first_token", "time_per_output_token", "inter_message_gap", "inter_token_gap", "end_to_end"):
        assert set(report["latency_ms"][name]) == {"count", "mean", "p50", "p90", "p95", "p99", "min", "max"}

    printed = capsys.readouterr()
    assert "8 requests completed" in printed.out
    assert "drafts                64 proposed, 48 accepted (75.0%)" in printed.out
    assert "24 tokens came in 8 bursts" in printed.out
    assert "█" in printed.out
    assert printed.err == "", "no progress bar off a terminal"


async def test_prompts_come_from_a_file(tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "one", "max_tokens": 2}\n{"prompt": "two"}\n', encoding="utf-8")
    async with running_script(ScriptedServer()) as script:
        code = await run_command(
            *("--target", script.address, "--dataset", str(dataset), "--random-output-len", "7"),
            *("--num-prompts", "4", "--num-warmups", "0", "--max-concurrency", "1"),
        )
    assert code == 0
    asked = [(request.text, request.sampling.max_tokens) for request in script.requests]
    assert asked == [("one", 2), ("two", 7)] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--random-input-len", "2000"), "is 2128 tokens, and scripted takes 1000"),
        (("--dataset", "/nowhere/prompts.txt"), "cannot read /nowhere/prompts.txt"),
        (("--goodput", "ttft_ms:5"), "must be like ttft_ms:500,tpot_ms:50"),
        (("--output", "/nowhere/report.json"), "there is no folder /nowhere"),
        (("--request-rate", "0"), "must be a number above 0"),
        (("--timeout", "inf"), "--timeout: must be a number of seconds above 0"),
        (("--num-prompts", "-1"), "must be an integer of at least 1"),
    ],
)
async def test_wrong_arguments_are_one_line_and_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_script(ScriptedServer()) as script:
        assert await run_command("--target", script.address, *arguments) == 2
    assert script.requests == []
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


async def test_a_call_past_its_deadline_is_counted_as_failed(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_script(ScriptedServer(hold=asyncio.Event().wait)) as script:
        arguments = ("--target", script.address, "--num-prompts", "2", "--num-warmups", "0", "--timeout", "0.2")
        assert await run_command(*arguments) == 1
    assert "DEADLINE_EXCEEDED: 2" in capsys.readouterr().out


async def test_no_server_is_one_line_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run_command("--target", "127.0.0.1:1") == 1
    error = capsys.readouterr().err
    assert error.startswith("outrider: 127.0.0.1:1: ")
    assert error.count("\n") == 1


def test_what_to_measure_must_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "say what to measure: engine, serve" in capsys.readouterr().err
