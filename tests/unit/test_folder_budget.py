"""Files of a folder within a number of bytes."""

import os
from pathlib import Path

from connectors.folder_budget import ABANDONED_AFTER_S, FolderBudget

NOW_S = 1_000_000.0
NBYTES = 1000


def put(root: Path, number: int, used_s: float) -> Path:
    """A file like that of a block."""
    folder = root / ("a" * 64) / "0f"
    folder.mkdir(parents=True, exist_ok=True)
    return age(folder / f"{number:064x}.kv", used_s)


def age(path: Path, used_s: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(NBYTES))
    os.utime(path, (used_s, used_s))
    return path


def budget_of(root: Path, num_files: int | None) -> FolderBudget:
    return FolderBudget(root, None if num_files is None else num_files * NBYTES, lambda: NOW_S)


def test_those_used_longest_ago_go(tmp_path: Path) -> None:
    order = [7, 3, 9, 1, 5, 0, 2, 8, 4, 6, 11, 10]
    paths = [put(tmp_path, number, NOW_S + i) for i, number in enumerate(order)]
    budget_of(tmp_path, 10).wrote(NBYTES)
    left = [path.exists() for path in paths]
    assert left == sorted(left), "the oldest only"
    assert 8 <= sum(left) <= 10


def test_a_folder_with_room_is_left_alone(tmp_path: Path) -> None:
    paths = [put(tmp_path, number, NOW_S) for number in range(9)]
    budget_of(tmp_path, 10).wrote(NBYTES)
    assert all(path.exists() for path in paths)


def test_one_process_never_exceeds_its_budget_by_more_than_a_block(tmp_path: Path) -> None:
    budget = budget_of(tmp_path, 100)
    most = 0
    for number in range(400):
        put(tmp_path, number, NOW_S + number)
        most = max(most, sum(1 for _ in tmp_path.rglob("*.kv")))
        budget.wrote(NBYTES)
    assert 90 <= most <= 101
    assert not put(tmp_path, 0, NOW_S).with_name(f"{1:064x}.kv").exists()


def test_what_others_write_is_counted(tmp_path: Path) -> None:
    """It is seen with the next look, after a half of the room that was left."""
    budget = budget_of(tmp_path, 100)
    budget.wrote(NBYTES)
    for number in range(150):
        put(tmp_path, number, NOW_S)
    for _ in range(51):
        budget.wrote(NBYTES)
    assert sum(1 for _ in tmp_path.rglob("*.kv")) <= 100


def test_nothing_else_is_touched(tmp_path: Path) -> None:
    put(tmp_path, 1, NOW_S)
    others = [
        age(tmp_path / name, 0.0)
        for name in (
            "notes.txt",
            f"{1:064x}.kv",
            f"{'a' * 64}/{1:064x}.kv",
            f"{'a' * 64}/0f/notes.kv",
            f"{'a' * 64}/tmp/{1:064x}.kv",
            f"models/0f/{1:064x}.kv",
        )
    ]
    budget_of(tmp_path, 0).wrote(NBYTES)
    assert all(path.exists() for path in others)
    assert not (tmp_path / ("a" * 64) / "0f" / f"{1:064x}.kv").exists()


def test_what_was_never_finished_goes_once_it_is_old(tmp_path: Path) -> None:
    """Without a budget, too."""
    folder = put(tmp_path, 1, 0.0).parent
    young = age(folder / "x.kv.1.tmp", NOW_S - ABANDONED_AFTER_S + 1)
    old = age(folder / "x.kv.2.tmp", NOW_S - ABANDONED_AFTER_S - 1)
    budget_of(tmp_path, None).wrote(NBYTES)
    assert (young.exists(), old.exists()) == (True, False)
    assert (folder / f"{1:064x}.kv").exists()


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    budget_of(tmp_path / "gone", 1).wrote(NBYTES)
