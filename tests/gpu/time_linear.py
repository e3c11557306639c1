"""How long our linear layers take on this GPU, for few tokens and batch-invariant, beside torch's own.

`python -m tests.gpu.time_linear [--few | --sweep]`, from the repository root; time_kernels tells what a time is.
"""

import argparse
import itertools
from collections.abc import Callable
from contextlib import suppress
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import linear
from triton.runtime.errors import OutOfResources

from server.kernels import invariant_linear as linear_module
from server.kernels import skinny_linear as skinny_module
from server.kernels.invariant_linear import Tiling, invariant_linear
from server.kernels.invariant_mean import invariant_mean
from server.kernels.jit import num_multiprocessors
from server.kernels.skinny_linear import choose_tiling, skinny_gated_linear, skinny_linear, tile_counts
from tests.gpu.time_kernels import BYTES_PER_US, CACHE_NBYTES, DEVICE, DTYPE, FLOPS_PER_US, report, time_us

LINEARS = {"qkv": (4096, 6144), "out": (4096, 4096), "gate_up": (4096, 28_672), "down": (14_336, 4096)}
"""The 8B shape's, as (in, out)."""
SMALLER = {
    "1B qkv": (2048, 3072),
    "1B out": (2048, 2048),
    "1B gate_up": (2048, 16_384),
    "1B down": (8192, 2048),
    "135M qkv": (576, 960),
    "135M out": (576, 576),
    "135M gate_up": (576, 3072),
    "135M down": (1536, 576),
}


class LinearBench:
    """A product with as many weights as outgrow the cache."""

    def __init__(self, num_in: int, num_out: int, num_tokens: int) -> None:
        num_sets = max(2, CACHE_NBYTES // (2 * num_in * num_out) + 1)
        self.weights = torch.randn(num_sets, num_out, num_in, dtype=DTYPE, device=DEVICE)
        self.x = torch.randn(num_tokens, num_in, dtype=DTYPE, device=DEVICE)
        self.nbytes = self.weights[0].nbytes + self.x.nbytes + 2 * num_tokens * num_out
        self.flops = 2.0 * num_tokens * num_in * num_out

    def us(self, function: Callable[[Tensor, Tensor], Tensor]) -> float:
        return time_us([lambda weight=weight: function(self.x, weight) for weight in self.weights])  # type: ignore[misc]


def time_linear() -> None:
    """The batch-invariant layer beside cuBLAS, and the mean of RMSNorm beside torch's."""
    for num_tokens, (name, (num_in, num_out)) in itertools.product((1, 16, 64, 256, 8192), LINEARS.items()):
        bench = LinearBench(num_in, num_out, num_tokens)
        label = f"invariant linear {name} x {num_tokens}"
        report(label, bench.us(invariant_linear), bench.nbytes, bench.flops, cublas=bench.us(linear))
    for num_tokens in (1, 64, 8192):
        sets = torch.randn(4, num_tokens, 4096, device=DEVICE)
        time = time_us([lambda x=x: invariant_mean(x) for x in sets])  # type: ignore[misc]
        torch_us = time_us([lambda x=x: x.mean(-1, keepdim=True) for x in sets])  # type: ignore[misc]
        report(f"invariant mean {num_tokens} x 4096", time, sets[0].nbytes, torch=torch_us)


def time_few_tokens() -> None:
    """The layers of a decoding step beside cuBLAS: what gates, beside it and a kernel of ours behind it."""
    for (name, (num_in, num_out)), num_tokens in itertools.product((LINEARS | SMALLER).items(), (1, 8, 16, 32, 64)):
        bench, is_gated = LinearBench(num_in, num_out, num_tokens), name.endswith("gate_up")
        if choose_tiling(num_tokens, num_in, num_out, num_multiprocessors(bench.x.device), is_gated=is_gated) is None:
            continue
        counts = tile_counts(bench.weights[0])

        def multiply(x: Tensor, weight: Tensor, counts: Tensor = counts, *, is_gated: bool = is_gated) -> Tensor:
            return skinny_gated_linear(x, weight) if is_gated else skinny_linear(x, weight, None, counts)

        time = bench.us(multiply)
        with patch.object(skinny_module, "choose_tiling", lambda *_, **__: None):
            cublas = bench.us(multiply)
        report(f"{name} x {num_tokens}", time, bench.nbytes, bench.flops, cublas=cublas)


SMALL = [(64, 128, 4, 4), (64, 256, 4, 3), (64, 64, 4, 6), (64, 128, 8, 4), (128, 128, 4, 4)]
LARGE = [(128, 128, 64, 4, 4), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3)]


def sweep_linear() -> None:
    """By tiling and number of programs: what invariant_linear should choose."""
    tilings = {t: [Tiling(block_o, max(16, t), *rest) for block_o, *rest in SMALL] for t in (1, 64)}
    tilings[256] = tilings[8192] = [Tiling(*sizes) for sizes in LARGE]
    for num_tokens, name in itertools.product(tilings, ("out", "gate_up")):
        bench = LinearBench(*LINEARS[name], num_tokens)
        for tiling in tilings[num_tokens]:
            found = {}
            for num_programs in (128, 256, 512) if num_tokens <= 64 and name == "out" else (256,):
                programs = patch.object(linear_module, "NUM_PROGRAMS", num_programs)
                tiles = patch.object(linear_module, "choose_tiling", lambda *_, tiling=tiling: tiling)
                with programs, tiles, suppress(OutOfResources):  # of shared memory
                    found[num_programs] = bench.us(invariant_linear)
            floor = max(bench.nbytes / BYTES_PER_US, bench.flops / FLOPS_PER_US)
            times = " ".join(f"{programs}:{time:.1f}" for programs, time in found.items())
            print(f"{name} x {num_tokens} {tiling}: {times} (floor {floor:.1f})", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", action="store_true", help="time the layers of few tokens instead")
    parser.add_argument("--sweep", action="store_true", help="time tilings instead")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if arguments.few:
        time_few_tokens()
    elif arguments.sweep:
        sweep_linear()
    else:
        time_linear()


if __name__ == "__main__":
    main()
