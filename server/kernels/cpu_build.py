"""Compiles C++ operators at first use and keeps them on the disk, one file for each way to build them."""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from server.temporary_folder import temporary_folder

logger = logging.getLogger(__name__)

CPU_INFO = Path("/proc/cpuinfo")
TORCH = Path(torch.__file__).parent
FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast"),
    *("-shared", "-fPIC", "-fvisibility=hidden"),
)
STABLE_API_FLAG = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # no newer API than that of torch 2.10
TIMEOUT_S = 300.0


class BuildError(Exception):
    """No compiler, one that fails, or no place for what it makes; the message says which, why, and what helps."""


def build(
    source: Path,
    headers: Sequence[Path],
    folder: Path,
    environ: Mapping[str, str] = os.environ,
    *,
    uses_whole_api: bool = False,
) -> Path:
    """The shared library made from a C++ file, from `folder` if it is there already.

    Its name is a digest of all that goes into it: sources, flags, torch's version, the CPU's features.
    The file appears whole or not at all; of processes that build at once the last one's stays.

    Args:
        headers: what `source` includes of our own. environ: CXX names another compiler than c++ or g++.
        uses_whole_api: whether it needs more than torch's stable API, and so is for this torch alone.

    Raises: BuildError.
    """
    flags = FLAGS if uses_whole_api else (*FLAGS, STABLE_API_FLAG)
    library = folder / f"{source.stem}-{_digest([source, *headers], flags)}.so"
    if library.exists():
        return library
    compiler = _find_compiler(environ)
    started = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary_folder(folder) as temporary:
            output = temporary / library.name
            _compile(compiler, flags, source, output, environ)
            output.replace(library)
    except OSError as error:
        raise BuildError(f"cannot write {folder}: {error}; set XDG_CACHE_HOME to a writable folder") from error
    logger.info("built %s in %.0f s: %s", source.name, time.monotonic() - started, library)
    return library


def load_operators(source: Path, headers: Sequence[Path], folder: Path, loss: str) -> bool:
    """Build a library of operators if need be, and load it.

    Args: loss: what will be without them, such as "sampling on the CPU will be slow".
    Returns: False, after one line in the log that names the cause, where that is impossible.
    """
    try:
        torch.ops.load_library(build(source, headers, folder))
    except (BuildError, OSError) as error:
        logger.warning("%s, for want of C++ operators: %s", loss, error)
        return False
    return True


def _digest(sources: Sequence[Path], flags: Sequence[str]) -> str:
    parts = [torch.__version__, platform.machine(), cpu_features(), *flags]
    parts += [path.read_text(encoding="utf-8") for path in sources]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cpu_features() -> str:
    """What -march=native depends on; a cache may be shared by machines of several kinds."""
    if not CPU_INFO.exists():
        return platform.processor()
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _find_compiler(environ: Mapping[str, str]) -> str:
    names = [environ["CXX"]] if environ.get("CXX") else ["c++", "g++", "clang++"]
    found = (shutil.which(name, path=environ.get("PATH", "")) for name in names)
    compiler = next((path for path in found if path is not None), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler: {', '.join(names)} not found in PATH; install g++ or set CXX")
    return compiler


def _compile(compiler: str, flags: Sequence[str], source: Path, output: Path, environ: Mapping[str, str]) -> None:
    command = [compiler, *flags, "-isystem", str(TORCH / "include"), str(source)]
    command += [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(output)]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took more than {TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise BuildError(f"{compiler} cannot be run: {error}") from error
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if "error" in line.lower()), done.stderr.strip())
        raise BuildError(f"{compiler} exited with {done.returncode}: {reason}")
