"""Linear layers of few tokens: real shapes against higher precision, and the same bits every time."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from server.kernels.jit import num_multiprocessors
from server.kernels.skinny_linear import (
    MAX_TOKENS,
    can_multiply,
    choose_tiling,
    skinny_gated_linear,
    skinny_linear,
    tile_counts,
)
from tests.gpu.test_kernels import MAX_ERROR, relative_error, replayed

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
TOKENS = (1, 2, 8, 9, 16, 17, 32, 33, MAX_TOKENS, MAX_TOKENS + 1, 300)
"""On every side of a change of tiling."""
NUM_REPLAYS = 200


def made(num_in: int, num_rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Many tokens, and a weight."""
    generator = torch.Generator(DEVICE).manual_seed(num_in)
    x = torch.randn(max(TOKENS), num_in, generator=generator, device=DEVICE).to(dtype)
    weight = torch.randn(num_rows, num_in, generator=generator, device=DEVICE) / num_in**0.5
    return x, weight.to(dtype)


LINEARS = [(4096, 6144), (4096, 4096), (14_336, 4096), (576, 960), (1536, 576), (2048, 2048), (8192, 2048), (1000, 999)]
GATED = [(4096, 28_672), (2048, 16_384), (576, 3072), (1000, 998)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_in", "num_rows"), LINEARS)
def test_linear(num_in: int, num_rows: int, dtype: torch.dtype) -> None:
    x, weight = made(num_in, num_rows, dtype)
    counts = tile_counts(weight)
    residual = torch.randn(x.shape[0], num_rows, device=DEVICE).to(dtype)
    for bias, added in ((None, None), (weight[:, 0].contiguous(), None), (None, residual)):
        expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        if added is not None:
            expected += added.double()
        for count in TOKENS:
            found = skinny_linear(x[:count], weight, bias, counts, None if added is None else added[:count])
            assert found.dtype == dtype
            assert relative_error(found, expected[:count]) < MAX_ERROR[dtype], f"{count} tokens"
    assert not counts.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_in", "num_rows"), GATED)
def test_gated_linear(num_in: int, num_rows: int, dtype: torch.dtype) -> None:
    x, weight = made(num_in, num_rows, dtype)
    gate, up = functional.linear(x.double(), weight.double()).chunk(2, -1)
    expected = functional.silu(gate) * up
    for count in TOKENS:
        found = skinny_gated_linear(x[:count], weight)
        assert found.dtype == dtype
        assert relative_error(found, expected[:count]) < MAX_ERROR[dtype], f"{count} tokens"


@pytest.mark.parametrize("num_tokens", [16, 32, MAX_TOKENS])
def test_a_split_sum_has_the_same_bits_in_every_replay(num_tokens: int) -> None:
    """Whichever program is last; that counts what it finds is what the launch before has left."""
    x, weight = made(14_336, 4096)
    if can_multiply(weight):
        tiling = choose_tiling(num_tokens, 14_336, 4096, num_multiprocessors(DEVICE), is_gated=False)
        assert tiling is not None
        assert tiling.num_splits > 1
    counts, outputs = tile_counts(weight), []
    expected = skinny_linear(x[:num_tokens], weight, None, counts)

    def run() -> None:
        outputs.append(skinny_linear(x[:num_tokens], weight, None, counts))

    graph, differing = replayed(run), torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(NUM_REPLAYS):
        outputs[-1].fill_(torch.nan)
        graph.replay()
        differing += (outputs[-1] != expected).sum()
    assert differing == 0
    assert not counts.any()
