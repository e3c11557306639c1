"""Saving prompts layer by layer against saving them as a whole: two engines of one model by turns.

    python -m tests.bench.time_layerwise smollm2-135m --connectors filesystem,memory

For each pair both engines compute a prompt of their own, the one that goes first changes. Measured are the time until
the first token, until the last of the prompt's blocks is in the store, and that of the steps that compute the prompt.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from connectors.filesystem import FilesystemConfig
from connectors.memory import MemoryConfig
from connectors.save_failure import SaveFailure
from connectors.store import BlockStore
from server.commands.bench_environment import describe_host, describe_run
from server.events import Event, StepFinished
from server.model.resolve import pull
from server.request import SamplingParams
from tests.bench.paired import median_ratio
from tests.fakes.engine_under_test import EngineUnderTest, engine_on
from tests.fakes.eventually import eventually

FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
STORE_TIMEOUT_S = 60.0


class TimedStore:
    """Another store, and when blocks were kept in it; implements connectors.store.BlockStore."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self.kept_s: list[float] = []
        self.expect, self.find, self.load, self.close = store.expect, store.find, store.load, store.close

    def save(self, namespace: str, block_hash: bytes, data: memoryview) -> SaveFailure | None:
        """As the store does."""
        failure = self._store.save(namespace, block_hash, data)
        assert failure is None, failure
        self.kept_s.append(time.perf_counter())
        return failure


STORES: list[TimedStore] = []
"""Those that were opened; the last one is of the engine that was started last."""


class TimedFiles(FilesystemConfig):
    """Settings of a filesystem that is watched."""

    def open_store(self) -> BlockStore:
        """Also in STORES."""
        STORES.append(TimedStore(super().open_store()))
        return STORES[-1]


class TimedMemory(MemoryConfig):
    """Settings of a memory that is watched."""

    def open_store(self) -> BlockStore:
        """Also in STORES."""
        STORES.append(TimedStore(super().open_store()))
        return STORES[-1]


@dataclass(frozen=True, slots=True)
class Timing:
    """One prompt. Attributes: ttft_s, stored_s: from sending it. step_s: median of the steps that compute it."""

    ttft_s: float
    stored_s: float
    step_s: float


class Side:
    """One of the two engines."""

    def __init__(self, engine: EngineUnderTest, store: TimedStore, block_size: int) -> None:
        self._engine = engine
        self._store = store
        self._block_size = block_size
        self._steps: list[StepFinished] = []
        self._is_stored = threading.Event()
        engine.core.bus.subscribe(self._take_in)

    def _take_in(self, event: Event) -> None:
        if isinstance(event, StepFinished) and event.num_query_tokens > event.num_rows:
            self._steps.append(event)

    def measure(self, prompt: list[int]) -> Timing:
        """Compute a prompt that nobody knows, and wait until it is stored."""
        self._steps.clear()
        self._store.kept_s.clear()
        begun_s = time.perf_counter()
        outcome = self._engine.generate([prompt], FIRST_TOKEN)[0]
        first_s = time.perf_counter()
        assert outcome.error is None
        assert outcome.num_cached_tokens == 0
        num_blocks = len(prompt) // self._block_size
        self._engine._run(eventually(lambda: len(self._store.kept_s) == num_blocks, timeout_s=STORE_TIMEOUT_S))
        durations = [step.duration_s for step in self._steps]
        return Timing(first_s - begun_s, max(self._store.kept_s) - begun_s, statistics.median(durations))


def prompts(length: int, seed: int) -> list[int]:
    """Ids that every tokenizer has."""
    rng = random.Random(seed)
    return [rng.randrange(100, 10_000) for _ in range(length)]


def measure(arguments: argparse.Namespace, connector: str, folder: Path) -> list[tuple[Timing, Timing]]:
    """(whole, layerwise) of each pair, behind one that does not count."""
    extra: dict[str, object] = {"max_bytes": "4GiB"}
    name = {"filesystem": "TimedFiles", "memory": "TimedMemory"}[connector]
    with ExitStack() as stack:
        sides = []
        for layerwise in (False, True):
            own = {**extra, "layerwise": layerwise}
            if connector == "filesystem":
                own["shared_storage_path"] = str(folder / str(layerwise))
            choice = {"kv_connector": f"{__name__}:{name}", "kv_connector_extra_config": own}
            engine = stack.enter_context(
                engine_on(
                    pull(arguments.model, None),
                    arguments.device,
                    num_threads=arguments.threads,
                    dtype="auto",
                    compile=arguments.compile,
                    block_size=arguments.block_size,
                    kv_cache_memory_bytes=arguments.kv_bytes,
                    max_num_batched_tokens=arguments.budget,
                    kv_transfer_config=choice,
                )
            )
            sides.append(Side(engine, STORES[-1], arguments.block_size))
        pairs = []
        for number in range(arguments.pairs + 1):
            timings: dict[int, Timing] = {}
            for place in (0, 1) if number % 2 else (1, 0):
                timings[place] = sides[place].measure(prompts(arguments.prompt_len, 2 * number + place))
            if number:
                pairs.append((timings[0], timings[1]))
    return pairs


def report(connector: str, pairs: Sequence[tuple[Timing, Timing]]) -> None:
    """A line for each quantity: both medians, and the median of the pairs' ratios with its 95% interval."""
    print(f"{connector}, {len(pairs)} pairs")
    for label, field in (("first token", "ttft_s"), ("all blocks stored", "stored_s"), ("step", "step_s")):
        whole, layers = ([getattr(pair[side], field) for pair in pairs] for side in (0, 1))
        ratio = median_ratio([mine / theirs for theirs, mine in zip(whole, layers, strict=True)])
        print(
            f"  {label:18} whole {1e3 * statistics.median(whole):8.1f} ms   "
            f"layerwise {1e3 * statistics.median(layers):8.1f} ms   "
            f"ratio {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        )
    behind = [[1e3 * (pair[side].stored_s - pair[side].ttft_s) for pair in pairs] for side in (0, 1)]
    whole_ms, layers_ms = map(statistics.median, behind)
    print(f"  behind first token whole {whole_ms:8.1f} ms   layerwise {layers_ms:8.1f} ms")


def main() -> None:
    """Measure each connector."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--connectors", default="filesystem,memory", help="filesystem, memory, or both")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--prompt-len", type=int, default=2000)
    parser.add_argument("--budget", type=int, default=512, help="max_num_batched_tokens")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument(
        "--threads", type=int, default=2, help="of torch; fewer than there are cores leaves one to copy"
    )
    parser.add_argument("--kv-bytes", default="256MiB", help="kv_cache_memory_bytes of each engine")
    parser.add_argument("--compile", default="wait", choices=("none", "wait"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--storage", type=Path, help="folder for the blocks; one of its own if not given")
    arguments = parser.parse_args()
    print(json.dumps({**describe_run(("torch", "transformers")), **describe_host()}))
    print(f"{arguments.prompt_len} tokens, steps of {arguments.budget}, {arguments.threads} threads")
    for connector in arguments.connectors.split(","):
        with tempfile.TemporaryDirectory(dir=arguments.storage) as folder:
            report(connector, measure(arguments, connector, Path(folder)))


if __name__ == "__main__":
    main()
