"""The process in which something is compiled ahead of time: told what and where to on its command line."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from server.errors import ModelError
from server.kernels import cpu_attention, cpu_layers, cpu_linear
from server.model.cache import cache_root, publish_folder
from server.temporary_folder import temporary_folder

SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("attention.py", "compile_process.py", "fusion.py", "package.py")
)
"""What they say decides what is compiled, whatever it is of."""
_NICENESS = 10
"""Serving goes first."""


def load_operators(num_threads: int) -> None:
    """Make ready what compiled code calls, on so many threads. Raises: RuntimeError, BuildError, OSError."""
    kernels = cache_root() / "kernels"
    cpu_layers.load(kernels)
    if not (cpu_attention.load(kernels) and cpu_linear.load(kernels)):
        raise RuntimeError("the C++ operators of the layers cannot be built")
    torch.set_num_threads(num_threads)


def run(compile_into: Callable[[str, Path], None]) -> None:
    """Have the folder that was asked for filled, which appears whole or not at all; exit with a word on a full disk.

    Args: compile_into: (order, empty folder).
    Raises: what it raises.
    """
    os.nice(_NICENESS)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    order, target = sys.argv[1], Path(sys.argv[2])
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(target.parent) as temporary:
        # Compilers' own files too: there is one place that may be full, and it is swept if this process is killed.
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(temporary), "TMPDIR": str(temporary)}
        os.environ["LC_ALL"] = "C"  # errors are looked for in what compilers say
        try:
            publish_folder(target, lambda folder: compile_into(order, folder))
        except ModelError as error:
            sys.exit(str(error))


def _end_with_the_parent() -> None:
    """The parent holds the other end of standard input: it closes with it, however that ends."""
    os.read(sys.stdin.fileno(), 1)  # not sys.stdin.read, whose lock would be held as the interpreter ends
    if os.getpgrp() == os.getpid():  # a C++ compiler that it waits for would go on for half a minute
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
