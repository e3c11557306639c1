"""The command line: flags out of settings, errors into exit codes."""

from pathlib import Path

import pytest

from proposers.training.__main__ import STAGES, main
from proposers.training.generation import GenerateSettings, plan_shards
from proposers.training.prompt_file import PromptRecord, Split, write_prompts

STAGE_NAMES = ["prompts", "generate", "train", "export", "evaluate", "end-to-end"]


@pytest.mark.parametrize("stage", STAGE_NAMES)
def test_every_setting_has_help(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([stage, "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for settings in STAGES[stage][1]:
        for name, field in settings.model_fields.items():
            assert field.description, name
            assert "--" + name.replace("_", "-") in text
    assert list(STAGES) == STAGE_NAMES


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["train", "--texts", "t", "--output", "o", "--epochs", "0"],
            "--epochs: Input should be greater than 0",
        ),
        (["train", "--texts", "t", "--output", "o", "--kind", "x", "--seed", "-1"], "--seed"),
        (["evaluate", "--texts", "t", "--head", "h", "--ks", "2", "x"], "--ks"),
        (["generate", "--prompts", "/nowhere.jsonl", "--output", "OUTPUT"], "/nowhere.jsonl holds no prompts"),
        (["export", "--run", "OUTPUT", "--output", "o"], "is no training run"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main([str(tmp_path) if each == "OUTPUT" else each for each in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("training: ")
    assert words in error
    assert error.count("\n") == 1


def test_several_workers_need_to_know_their_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_prompts(tmp_path / "p.jsonl", [PromptRecord("prose", "x", "train", ("a",))])
    given = ["generate", "--prompts", str(tmp_path / "p.jsonl"), "--output", str(tmp_path), "--num-workers", "2"]
    assert main(given) == 2
    assert "--kv-cache-memory-bytes" in capsys.readouterr().err


def test_shards_are_a_function_of_prompts_and_settings(tmp_path: Path) -> None:
    counts: dict[Split, int] = {"train": 50, "heldout": 6, "handwritten": 3}
    write_prompts(
        tmp_path / "p.jsonl",
        [PromptRecord("prose", "x", split, (f"{split} {i}",)) for split, count in counts.items() for i in range(count)],
    )
    settings = GenerateSettings(prompts=(tmp_path / "p.jsonl",), output=tmp_path, shard_size=20)
    shards = plan_shards(settings)
    assert {path.name: len(jobs) for path, jobs in shards.items()} == {
        "texts-train-00000.npz": 20,
        "texts-train-00001.npz": 20,
        "texts-train-00002.npz": 10,
        "texts-heldout-00000.npz": 12,
        "texts-handwritten-00000.npz": 6,
    }
    assert plan_shards(settings) == shards
    trained = [job for path, jobs in shards.items() if "train" in path.name for job in jobs]
    assert len({job.prompt.text for job in trained}) == 50
    assert 10 < sum(job.temperature == 0 for job in trained) < 40
    measured = shards[tmp_path / "texts-heldout-00000.npz"]
    assert [job.temperature for job in measured] == [0.0, 0.8] * 6
    few = plan_shards(settings.model_copy(update={"max_prompts": 4}))
    assert {len(jobs) for jobs in few.values()} == {4, 8, 6}
