import errno
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from server.errors import ModelError
from server.model.cache import cache_root, publish_folder
from server.temporary_folder import temporary_folder

ROOT = Path(__file__).parents[2]


def write_one(folder: Path) -> None:
    (folder / "file").write_text("x")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/data/cache"}, Path("/data/cache/outrider")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache/outrider"),
        ({"XDG_CACHE_HOME": ""}, Path.home() / ".cache/outrider"),
        ({}, Path.home() / ".cache/outrider"),
    ],
)
def test_cache_root(environ: dict[str, str], expected: Path) -> None:
    assert cache_root(environ) == expected


def test_a_published_folder_is_not_built_again(tmp_path: Path) -> None:
    target = publish_folder(tmp_path / "a" / "model", write_one)

    def fail(folder: Path) -> None:
        raise AssertionError("built twice")

    assert publish_folder(target, fail) == target
    assert os.listdir(target.parent) == ["model"]


@pytest.mark.parametrize("error", [ModelError("broken download"), KeyboardInterrupt()])
def test_a_failed_build_leaves_nothing_behind(tmp_path: Path, error: BaseException) -> None:
    def build(folder: Path) -> None:
        write_one(folder)
        raise error

    with pytest.raises(type(error)):
        publish_folder(tmp_path / "model", build)
    assert os.listdir(tmp_path) == []


def test_two_builders_at_once_the_later_one_discards_its_copy(tmp_path: Path) -> None:
    both_built = threading.Barrier(2, timeout=30)
    results: list[Path] = []

    def build(folder: Path) -> None:
        (folder / "file").write_text(threading.current_thread().name)
        both_built.wait()

    threads = [
        threading.Thread(target=lambda: results.append(publish_folder(tmp_path / "model", build)), name=name)
        for name in ("one", "two")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tmp_path / "model"] * 2
    assert os.listdir(tmp_path) == ["model"]
    assert (tmp_path / "model" / "file").read_text() in ("one", "two")


def test_what_a_killed_builder_left_is_deleted_but_not_what_a_live_one_fills(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, pathlib; from server.temporary_folder import temporary_folder\n"
        "with temporary_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').write_text('x')\n"
        "    print(folder, flush=True)\n"
        "    sys.stdin.read()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        left_behind = Path(child.stdout.readline().strip())
        publish_folder(tmp_path / "one", write_one)
        assert (left_behind / "half").exists()
        child.communicate("")
    assert (left_behind / "half").exists()
    publish_folder(tmp_path / "two", write_one)
    assert sorted(os.listdir(tmp_path)) == ["one", "two"]


def test_a_folder_swept_before_it_was_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = tempfile.mkdtemp
    made: list[str] = []

    def make_and_sweep(**arguments: Any) -> str:
        made.append(str(make(**arguments)))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_sweep)
    with temporary_folder(tmp_path) as folder:
        assert [str(folder)] == made[1:]
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    (tmp_path / ".outrider-abc").mkdir()
    assert os.listdir(publish_folder(tmp_path / "model", write_one)) == ["file"]
    assert (tmp_path / ".outrider-abc").exists()


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelError, match=r"no space left .*XDG_CACHE_HOME"):
        publish_folder(tmp_path / "model", build)
    assert os.listdir(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "outrider").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match=r"cannot write .*XDG_CACHE_HOME"):
        publish_folder(tmp_path / "outrider" / "model", write_one)
