"""The device under a benchmark: its name, and how fast its memory is."""

import platform
import time
from pathlib import Path

import torch

_COPY_NBYTES = 512 << 20
"""Beyond every cache; two of these are allocated."""
_NUM_COPIES, _NUM_TRIES = 5, 10


def device_name(device: str) -> str:
    """The name its maker gave it, as far as the system knows."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def copy_bandwidth(device: str, nbytes: int = _COPY_NBYTES) -> float:
    """Bytes read and written per second by a copy of `nbytes` bytes, the best of ten tries.

    On the CPU with as many threads as torch uses; a step that only reads may be a little faster there.
    """
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # the first one maps the pages
    durations_s = []
    for _ in range(_NUM_TRIES):
        _wait(device)
        start_s = time.perf_counter()
        for _ in range(_NUM_COPIES):
            target.copy_(source)
        _wait(device)
        durations_s.append(time.perf_counter() - start_s)
    return 2 * nbytes * _NUM_COPIES / min(durations_s)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
