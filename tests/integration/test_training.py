"""From files to a head that drafts in the engine, through the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from proposers.training.__main__ import main
from proposers.training.prompt_file import PromptRecord, Split, write_prompts
from tests.tiny_model import build_tiny_model


def command(stage: str, *arguments: object) -> int:
    return main([stage, *map(str, arguments)])


def lengths(path: Path, **wanted: object) -> dict[int, float]:
    """Mean lengths by number of drafts, of texts of all kinds."""
    wanted |= {"kind": "all", "is_low_repetition": False}
    entries: list[dict[str, Any]] = json.loads(path.read_text())
    chosen = [entry for entry in entries if all(entry[name] == value for name, value in wanted.items())]
    return {entry["k"]: entry["mean_length"] for entry in chosen}


def write_small_prompts(path: Path, num_train: int, first_held_out: int) -> None:
    """Few tokens each. Args: first_held_out: the prompts from this one on, 6 of them, are measured on."""
    splits: dict[Split, range] = {
        "train": range(num_train),
        "heldout": range(first_held_out, first_held_out + 6),
    }
    write_prompts(
        path,
        [
            PromptRecord("prose", "x", split, (f"{index} brown dog",))
            for split, indices in splits.items()
            for index in indices
        ],
    )


def run_stages(
    folder: Path, device: str, *, num_train: int, first_held_out: int, num_tokens: int, train: list[object]
) -> None:
    target = ["--model", build_tiny_model(folder / "model", num_layers=3), "--device", device, "--dtype", "float32"]
    prompts, texts, run = folder / "prompts.jsonl", folder / "texts", folder / "run"
    write_small_prompts(prompts, num_train, first_held_out)
    engine = ["--max-num-seqs", 16, "--kv-cache-memory-bytes", "16MiB", "--max-tokens", num_tokens]
    engine += ["--max-prompt-tokens", 32, "--prompts", prompts]
    assert command("generate", *target, *engine, "--compile", "none", "--output", texts, "--greedy-share", 1) == 0
    before = {path.name: path.stat().st_mtime_ns for path in texts.iterdir()}
    assert command("generate", *target, *engine, "--compile", "none", "--output", texts, "--greedy-share", 1) == 0
    assert {path.name: path.stat().st_mtime_ns for path in texts.iterdir()} == before, "what is there is kept"
    late = ["--output", folder / "late", "--stop-after-seconds", 1e-9]
    assert command("generate", *target, *engine, "--compile", "none", *late) == 3
    assert not list((folder / "late").iterdir())
    assert command("train", *target, "--texts", texts, "--output", run, "--vocab-size", 512, *train) == 0
    assert (run / "curves.png").stat().st_size > 1000
    assert command("export", *target, "--run", run, "--output", folder / "head") == 0
    measured = ["--ks", 1, 3, "--output"]
    assert command("evaluate", *target, "--texts", texts, "--head", folder / "head", *measured, folder / "t.json") == 0
    methods = ["--methods", f"eagle3={folder / 'head'}", "--temperatures", 0, "--compile", "none"]
    assert command("end-to-end", *target, *engine, *methods, *measured, folder / "e.json") == 0


def test_a_head_is_trained_exported_and_served(tmp_path: Path, device_name: str) -> None:
    train = ["--row-length", 64, "--batch-rows", 4, "--epochs", 3, "--passes", 2]
    run_stages(tmp_path, device_name, num_train=20, first_held_out=20, num_tokens=24, train=train)
    greedy = {"method": "eagle3", "temperature": 0.0, "drafts": "greedy"}
    foreseen, seen = lengths(tmp_path / "t.json", **greedy), lengths(tmp_path / "e.json", **greedy)
    assert set(foreseen) == set(seen) == {1, 3}
    # The last step of an answer is cut short in the engine, and left out of the other.
    assert all(abs(foreseen[k] - seen[k]) < 0.15 for k in seen)
    again = ["--init", tmp_path / "head", "--output", tmp_path / "again", *train, "--epochs", 1]
    target = ["--model", tmp_path / "model", "--device", device_name, "--dtype", "float32"]
    assert command("train", *target, "--texts", tmp_path / "texts", *again) == 0
    assert command("export", *target, "--run", tmp_path / "again", "--output", tmp_path / "head-again") == 0
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("head", "head-again")]
    assert sizes[0] == sizes[1]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_what_was_learnt_is_drafted(tmp_path: Path, device_name: str) -> None:
    """Some 100 steps over few texts, and what is measured on is among them: the head knows it by heart."""
    train = ["--row-length", 64, "--batch-rows", 3, "--epochs", 80, "--learning-rate", 5e-3, "--passes", 3]
    run_stages(tmp_path, device_name, num_train=12, first_held_out=3, num_tokens=20, train=train)
    reports = [json.loads(line) for line in (tmp_path / "run" / "progress.jsonl").read_text().splitlines()]
    assert 100 < max(report["step"] for report in reports) < 400
    greedy = {"method": "eagle3", "temperature": 0.0, "drafts": "greedy"}
    foreseen, seen = lengths(tmp_path / "t.json", **greedy), lengths(tmp_path / "e.json", **greedy)
    for lengths_by_k in (foreseen, seen):
        assert lengths_by_k[1] > 1.6
        assert lengths_by_k[3] > 2
    # The last step of an answer is cut short in the engine, and left out of the other.
    assert all(abs(foreseen[k] - seen[k]) < 0.3 for k in seen)
