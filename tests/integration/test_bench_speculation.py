"""`outrider bench speculation` on the tiny model, from its arguments to its report."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clients.workload import Prompt
from server.cli import main
from server.commands.bench_speculation_rounds import Bench, Measured
from server.scheduler.draft_policy import DraftPolicy
from tests.fakes.proposer_settings import SETTINGS, build_models, config_of, with_models
from tests.tiny_model import build_tiny_model

SMALL = ("--device", "cpu", "--dtype", "float32", "--compile", "none", "--kv-cache-memory-bytes", "2MiB")
NGRAM = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("tiny")))


def bench(*arguments: str) -> int:
    return main(["bench", "speculation", *SMALL, *arguments])


@pytest.fixture(scope="module")
def report(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two proposers, two workloads, two loads, a change."""
    output = tmp_path_factory.mktemp("report") / "report.json"
    code = bench(
        *(model, "--concurrency", "1,2", "--drafts", "0,1,5", "--workloads", "repeat,random", "--repeat", "2"),
        *("--input-len", "8", "--output-len", "4", "--change-steps", "2", "--output", str(output)),
        *("--speculative-config", NGRAM, "--speculative-config", "random"),
    )
    assert code == 0
    loaded: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return loaded


def test_the_report_says_what_was_measured_and_on_what(report: dict[str, Any]) -> None:
    assert set(report) == {
        *("command", "time", "commit", "versions", "host", "load", "settings", "goals", "is_complete", "proposers"),
    }
    assert report["is_complete"]
    assert report["load"]["concurrency"] == [1, 2]
    assert report["goals"] == {"auto_per_off": 0.98, "auto_per_best": 0.95}
    assert "speculative_config" not in report["settings"]
    ngram, random = report["proposers"]
    assert ngram["config"]["num_speculative_tokens"] == 2
    assert random["config"]["method"].endswith(":RandomConfig")
    for each in (ngram, random):
        assert each["model"]["dtype"] == "float32"
        assert each["device"]["threads"] > 0


def test_every_cell_has_every_number_of_drafts_and_auto(report: dict[str, Any]) -> None:
    for proposer, drafts in zip(report["proposers"], (["0", "1", "2", "auto"], ["0", "1", "5", "auto"]), strict=True):
        cells = [(cell["workload"], cell["concurrency"]) for cell in proposer["cells"]]
        assert cells == [("repeat", 1), ("repeat", 2), ("random", 1), ("random", 2)]
        for cell in proposer["cells"]:
            assert [each["drafts"] for each in cell["candidates"]] == drafts, "cut to what the proposer makes"
            for each in cell["candidates"]:
                assert len(each["tokens_per_s"]["all"]) == len(each["step_ms"]["all"]) == 2
                assert 0 <= each["draft_time_share"] <= 1


def test_a_fixed_number_is_what_its_steps_verify(report: dict[str, Any]) -> None:
    for cell in report["proposers"][1]["cells"]:
        off, *fixed, auto = cell["candidates"]
        assert (off["mean_drafts_chosen"], off["acceptance_rate"]) == (0, None)
        for each in fixed:
            assert each["mean_drafts_chosen"] == int(each["drafts"])
            assert each["acceptance_rate"] < 0.2, "random drafts are wrong"
            assert 1 <= each["mean_acceptance_length"] < 2
        assert auto["mean_drafts_chosen"] <= 8


def test_ratios_are_those_of_each_turn(report: dict[str, Any]) -> None:
    for proposer in report["proposers"]:
        for cell in (*proposer["cells"], *proposer["changes"]):
            rates = {each["drafts"]: each["tokens_per_s"] for each in cell["candidates"]}
            for name, other in (("auto_per_off", "0"), ("auto_per_best", str(cell["best_fixed"]))):
                pairs = zip(rates["auto"]["all"], rates[other]["all"], strict=True)
                assert cell[name]["all"] == pytest.approx([ours / theirs for ours, theirs in pairs])
            best = max(rate["median"] for drafts, rate in rates.items() if drafts != "auto")
            assert rates[str(cell["best_fixed"])]["median"] == best


def test_workload_and_load_change_and_change_back(report: dict[str, Any]) -> None:
    for proposer in report["proposers"]:
        phases = [(phase["workload"], phase["concurrency"]) for phase in proposer["changes"]]
        assert phases == [("repeat", 1), ("random", 2), ("repeat", 1)]


def test_the_table_lines_up_and_ends_with_a_verdict(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = bench(
        *(model, "--concurrency", "1", "--workloads", "text", "--drafts", "2", "--repeat", "1", "--input-len", "8"),
        *("--output-len", "4", "--change-steps", "0", "--temperature", "0.8", "--speculative-config", NGRAM),
    )
    assert code == 0
    title, columns, line, *verdict, _ = capsys.readouterr().out.splitlines()
    settings = json.loads(title[title.index("{") :])
    assert settings.items() >= json.loads(NGRAM).items()
    assert columns.split()[:5] == ["workload", "batch", "off", "k=2", "auto"]
    assert len(columns) == len(line)
    assert [each.split(":")[0] for each in verdict[:2]] == ["cells, auto/off >= 0.98", "cells, auto/best >= 0.95"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return build_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    "methods", [*([method] for method in (*SETTINGS, "suffix")), ["suffix", "layer_skip"]], ids=str
)
def test_every_proposer_can_be_measured_in_a_piece(
    model: str, models: dict[str, str], tmp_path: Path, methods: list[str]
) -> None:
    config = with_models([config_of(method, 2) for method in methods], models)
    output = tmp_path / "report.json"
    code = bench(
        *(model, "--concurrency", "8", "--drafts", "0,2", "--workloads", "random", "--repeat", "1"),
        *("--input-len", "4", "--output-len", "6", "--change-steps", "1", "--output", str(output)),
        *("--speculative-config", json.dumps(config)),
    )
    assert code == 0
    (proposer,) = json.loads(output.read_text(encoding="utf-8"))["proposers"]
    (cell,) = proposer["cells"]
    assert [each["drafts"] for each in cell["candidates"]] == ["0", "2", "auto"]
    assert [phase["concurrency"] for phase in proposer["changes"]] == [8, 8, 8]


def test_what_is_interrupted_tells_what_it_has(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, calls = Bench.measure, [0]

    async def interrupted(self: Bench, policy: DraftPolicy, prompts: Sequence[Prompt]) -> Measured:
        calls[0] += 1
        if calls[0] == 3 * 3 + 3 * 2 + 2:  # in the third turn of the second cell, of three candidates
            signal.raise_signal(signal.SIGINT)
        return await measure(self, policy, prompts)

    monkeypatch.setattr(Bench, "measure", interrupted)
    output = tmp_path / "report.json"
    code = bench(
        *(model, "--concurrency", "1,2", "--drafts", "0,1", "--workloads", "random", "--repeat", "2"),
        *("--input-len", "4", "--output-len", "4", "--change-steps", "2", "--output", str(output)),
        *("--speculative-config", NGRAM, "--speculative-config", "random"),
    )
    assert code == 130
    report = json.loads(output.read_text(encoding="utf-8"))
    assert not report["is_complete"]
    (proposer,) = report["proposers"]
    turns = [(cell["concurrency"], len(cell["auto_per_off"]["all"])) for cell in proposer["cells"]]
    assert (turns, proposer["changes"]) == ([(1, 2), (2, 1)], [])
    table, progress = capsys.readouterr()
    _, _, *lines, _, _, _, _, _ = table.splitlines()
    assert [line.split()[:2] for line in lines] == [["random", "1"], ["random", "2"]]
    assert progress.splitlines()[-1].endswith("random x 2 ended with 1 turns that count")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--concurrency", "1,0"), "must be an integer of at least 1, got '0'"),
        (("--workloads", "prose"), "must be {repeat,text,random}[,{repeat,text,random}...], got 'prose'"),
        (("--speculative-config", "none"), "without one there is nothing to measure"),
        (("--speculative-config", "auto"), "name what is measured in place of auto"),
        (("--speculative-config", '{"policy": "fixed"}'), "policies are what is measured; leave them out"),
        (("--speculative-config", '{"method": "ngramm"}'), "ngramm"),
        (("--concurrency", "65"), "65 sequences do not run together; raise --max-num-seqs"),
        (("--output-len", "500", "--change-steps", "0"), "is 564 tokens, and"),
        (("--change-steps", "40"), "--change-steps) is 928 tokens, and"),
        (("--output", "/nowhere/report.json"), "there is no folder /nowhere"),
    ],
)
def test_wrong_arguments_are_one_line_and_code_2(
    model: str, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(model, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("outrider: ") == 1
