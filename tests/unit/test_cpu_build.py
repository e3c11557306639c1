"""C++ operators are built once, by whoever comes first, and never half."""

import ctypes
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from server.kernels import cpu_build
from server.kernels.cpu_build import BuildError, build

ANSWER = '#include "answer.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return kAnswer; }\n'


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    """A library of one function, and its header."""
    source, header = tmp_path / "answer.cpp", tmp_path / "answer.h"
    source.write_text(ANSWER)
    header.write_text("constexpr int kAnswer = 42;\n")
    return source, header


def answer(library: Path) -> int:
    result: int = ctypes.CDLL(str(library)).answer()
    return result


def test_a_library_is_built_once(sources: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, header = sources
    with caplog.at_level(logging.INFO):
        library = build(source, [header], tmp_path / "cache")
        assert answer(library) == 42
        assert build(source, [header], tmp_path / "cache", {"PATH": ""}) == library
    assert [record.message.split(" in ")[0] for record in caplog.records] == ["built answer.cpp"]
    assert os.listdir(tmp_path / "cache") == [library.name]


def test_what_a_killed_build_has_left_is_deleted_by_the_next_one(sources: tuple[Path, Path], tmp_path: Path) -> None:
    source, header = sources
    left = tmp_path / "cache" / ".outrider-abc"
    left.mkdir(parents=True)
    (left / "half.so").write_text("half")
    library = build(source, [header], tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == [library.name]


def test_another_header_flag_cpu_or_torch_is_another_library(
    sources: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, header = sources
    first = build(source, [header], tmp_path)
    header.write_text("constexpr int kAnswer = 43;\n")
    second = build(source, [header], tmp_path)
    assert (answer(first), answer(second)) == (42, 43)
    (tmp_path / "cpuinfo").write_text("processor: 0\nflags: fpu avx2\n")
    monkeypatch.setattr(cpu_build, "CPU_INFO", tmp_path / "cpuinfo")
    third = build(source, [header], tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    fourth = build(source, [header], tmp_path)
    monkeypatch.setattr(cpu_build, "FLAGS", (*cpu_build.FLAGS, "-g"))
    assert len({first, second, third, fourth, build(source, [header], tmp_path)}) == 5


def test_builds_at_once_do_not_disturb_each_other(sources: tuple[Path, Path], tmp_path: Path) -> None:
    source, header = sources
    folder = tmp_path / "cache"
    barrier = threading.Barrier(3)

    def build_with_others(_: int) -> Path:
        barrier.wait()
        return build(source, [header], folder)

    with ThreadPoolExecutor(3) as pool:
        libraries = set(pool.map(build_with_others, range(3)))
    (library,) = libraries
    assert answer(library) == 42
    assert os.listdir(folder) == [library.name]


@pytest.mark.parametrize(
    ("environ", "text", "message"),
    [
        ({"PATH": ""}, ANSWER, r"no C\+\+ compiler: c\+\+, g\+\+, clang\+\+ not found in PATH"),
        ({"PATH": os.environ["PATH"], "CXX": "no-such-compiler"}, ANSWER, r"no-such-compiler not found in PATH"),
        ({"PATH": os.environ["PATH"], "CXX": "false"}, ANSWER, r"false exited with 1"),
        (dict(os.environ), "int answer() { return; }\n", r"exited with 1: .*answer\.cpp:1.* error"),
    ],
    ids=["no compiler", "unknown compiler", "failing compiler", "error in the source"],
)
def test_a_failed_build_names_its_cause_and_leaves_nothing(
    sources: tuple[Path, Path], tmp_path: Path, environ: dict[str, str], text: str, message: str
) -> None:
    source, header = sources
    source.write_text(text)
    folder = tmp_path / "cache"
    with pytest.raises(BuildError, match=message):
        build(source, [header], folder, environ)
    assert not folder.exists() or os.listdir(folder) == []


def test_a_folder_that_cannot_be_written(sources: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(BuildError, match=r"cannot write .*/cache/kernels: .*set XDG_CACHE_HOME to a writable folder"):
        build(sources[0], [sources[1]], tmp_path / "cache" / "kernels")


def test_a_compiler_that_hangs_is_given_up(
    sources: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "slow"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(cpu_build, "TIMEOUT_S", 0.2)
    with pytest.raises(BuildError, match="slow took more than"):
        build(sources[0], [sources[1]], tmp_path / "cache", {"PATH": os.environ["PATH"], "CXX": str(compiler)})


def test_without_a_compiler_there_is_one_line_and_no_operators(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from server.kernels import cpu_attention; folder = pathlib.Path(sys.argv[1]);"
        "print(cpu_attention.load(folder), cpu_attention.load(folder))"
    )
    environ = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environ,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "False False\n"
    assert done.stderr == (
        "attention on the CPU will be slow, for want of C++ operators: "
        "no C++ compiler: c++, g++, clang++ not found in PATH; install g++ or set CXX\n"
    )
