"""`outrider bench engine` on the tiny model, from its arguments to its report."""

import json
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from server.cli import main
from server.commands.bench_device import copy_bandwidth
from server.engine.engine import NativeEngine
from tests.tiny_model import build_tiny_model

SMALL = ("--device", "cpu", "--kv-cache-memory-bytes", "1MiB", "--input-len", "8", "--output-len", "6", "--repeat", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("tiny")))


def bench(*arguments: str) -> int:
    with patch("server.commands.bench_device.copy_bandwidth", partial(copy_bandwidth, nbytes=1 << 20)):
        return main(["bench", "engine", *SMALL, *arguments])


def test_each_batch_size_is_a_row(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report.json"
    speculation = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "policy": "fixed"}'
    code = bench(
        *(model, "--batch-sizes", "1,3", "--dtype", "float32", "--speculative-config", speculation),
        *("--output", str(output)),
    )
    assert code == 0
    report = json.loads(output.read_text(encoding="utf-8"))
    assert set(report) == {
        *("command", "time", "commit", "versions", "host", "device", "load", "settings", "model", "rows"),
    }
    assert report["load"]["batch_sizes"] == [1, 3]
    assert report["settings"]["speculative_config"]["num_speculative_tokens"] == 2
    assert report["versions"]["torch"]
    assert report["device"]["copy_bytes_per_s"] > 0
    assert report["model"]["dtype"] == "float32"
    assert report["model"]["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert [row["batch"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert len(row["step_ms"]["all"]) == 2
        assert row["tokens_per_s"] > 0
        assert row["tokens_per_step"] >= 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["batch", "1", "3"]
    assert len({len(line) for line in lines[-3:]}) == 1, "columns line up"


def test_one_token_each_measures_the_prefill(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(model, "--batch-sizes", "2", "--output-len", "1") == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[1:5] == ["-"] * 4


def test_a_shape_needs_no_weights(capsys: pytest.CaptureFixture[str]) -> None:
    geometry = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    tiny = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **geometry, **heads}
    with patch.dict("server.commands.bench_shapes.SHAPES", {"135m": tiny}):
        assert bench("--shape", "135m", "--batch-sizes", "1") == 0
    assert capsys.readouterr().out.startswith("135m, LlamaForCausalLM, bfloat16 on ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-sizes", "1,0"), "must be SIZE[,SIZE...], got '1,0'"),
        (("--shape", "9b"), "invalid choice: '9b'"),
        (("--shape", "8b", "--load-format", "dummy"), "load_format: --shape brings its own; give one of the two"),
        (("--output", "/nowhere/report.json"), "there is no folder /nowhere"),
        (("--port", "1"), "unknown argument --port"),
        (("--batch-sizes", "65"), "65 sequences do not run together; raise --max-num-seqs"),
        (("--input-len", "510"), "is 516 tokens, and"),
        (("--batch-sizes", "64", "--block-size", "256"), "need 64 KV blocks, and there are"),
    ],
)
def test_wrong_arguments_are_one_line_and_code_2(
    model: str, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*(() if "--shape" in arguments else (model,)), *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("outrider: ") == 1


def test_a_start_that_is_interrupted_leaves_no_step_thread(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter would tear it down in its step, and be aborted for that."""
    engines: list[NativeEngine] = []
    start = NativeEngine.start

    async def start_and_be_interrupted(engine: NativeEngine) -> None:
        await start(engine)
        engines.append(engine)
        raise KeyboardInterrupt

    monkeypatch.setattr(NativeEngine, "start", start_and_be_interrupted)
    assert bench(model, "--batch-sizes", "1") == 130
    assert [engine.is_alive for engine in engines] == [False]
