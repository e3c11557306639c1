"""How long steps that compute many prompts take on this GPU.

`python -m tests.gpu.time_prompts [--shape 8b|135m] [--repeat 5]`, from the repository root. Weights are random, layers
compiled, nothing is captured: of a small model the host decides how long these steps take.
"""

import argparse
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from server.request import Request, SamplingParams
from tests.fakes.stepping import Stepping
from tests.gpu.time_step import DEVICE, SHAPES

PROMPTS = {
    "64 of 64 to 91 tokens": [64 + i * 7 % 28 for i in range(64)],
    "64 of 77": [77] * 64,
    "1 of 2,000": [2000],
    "64 of 3 to 42": [3 + i % 40 for i in range(64)],
    "60 of 10 to 777": [10 + 13 * i for i in range(60)],
}


def time_wave(stepping: Stepping, lengths: Sequence[int], seed: int) -> float:
    """Milliseconds until all prompts have their first token, and two more."""
    rng = random.Random(seed)
    sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for i, length in enumerate(lengths):
        prompt = tuple(rng.randrange(5, 40_000) for _ in range(length))
        stepping.scheduler.add(Request(request_id=f"{seed}-{i}", prompt_token_ids=prompt, sampling=sampling))
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    while stepping.scheduler.has_requests:
        stepping.step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started_s)


def main() -> None:
    """Print a line for each kind of wave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        SHAPES[options.shape].save_pretrained(folder)
        stepping = Stepping(
            Path(folder),
            DEVICE,
            torch.bfloat16,
            load_format="dummy",
            depth=1,
            max_tokens=2112,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            max_num_partial_prefills=64,
            is_compiled=True,
        )
    for name, lengths in PROMPTS.items():
        first, *times = (time_wave(stepping, lengths, seed) for seed in range(options.repeat + 1))
        print(f"{name:24} {statistics.median(times):7.1f} ms, {min(times):.1f} to {max(times):.1f}; first {first:.1f}")


if __name__ == "__main__":
    main()
