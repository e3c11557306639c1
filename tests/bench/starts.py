"""How long the server takes from its start to SERVING, with an empty cache and with a filled one."""

import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench.contestants import OutriderServer


def measure_starts(model: str, settings: Sequence[str], count: int, logs: Path) -> dict[str, object]:
    """Seconds of `count` starts each; every cold one begins with no file that an earlier one made.

    What is built or compiled before SERVING is their difference: with `--compile wait` that is all
    of it. The model's own files are not fetched here, and the page cache knows them.
    """
    cold_s: list[float] = []
    warm_s: list[float] = []
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
            # Where programs keep caches: ours by XDG_CACHE_HOME, inductor's and triton's by the others.
            names = ("XDG_CACHE_HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
            environ = {**os.environ, **{name: str(Path(folder, name.lower())) for name in names}}
            for name in names:
                Path(environ[name]).mkdir()
            for durations_s, kind in ((cold_s, "cold"), (warm_s, "warm")):
                server = OutriderServer(model, settings, logs / f"start-{number}-{kind}.log", environ)
                durations_s.append(server.start_s)
                server.close()
    return {
        "cold_s": cold_s,
        "warm_s": warm_s,
        "compile_s": statistics.median(cold_s) - statistics.median(warm_s),
    }
