"""Linear layers of few tokens against torch's own; interpreted where there is no GPU."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from server.kernels.jit import num_multiprocessors
from server.kernels.skinny_linear import (
    MAX_TOKENS,
    SPLIT_O,
    WIDE_O,
    choose_tiling,
    skinny_gated_linear,
    skinny_linear,
    tile_counts,
)

DTYPE = torch.float16
"""The interpreter multiplies no bfloat16."""
MAX_ERROR = 2e-3
"""Of a result of about 1 that is rounded to the type."""
TOKENS = pytest.mark.parametrize("num_tokens", [1, 8, 9, 16, 33, MAX_TOKENS, MAX_TOKENS + 1])
HOPPER = 132


def made(num_tokens: int, num_in: int, num_rows: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens and a weight of which each product is about 1."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, num_in, generator=generator).to(device, DTYPE)
    weight = torch.randn(num_rows, num_in, generator=generator) / num_in**0.5
    return x, weight.to(device, DTYPE)


def check(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == DTYPE
    torch.testing.assert_close(found.double(), expected, rtol=MAX_ERROR, atol=MAX_ERROR)


@TOKENS
@pytest.mark.parametrize(("num_in", "num_rows"), [(1024, 64), (256, 128), (600, 96), (72, 10)])
def test_linear_equals_torch_s(kernel_device: str, num_in: int, num_rows: int, num_tokens: int) -> None:
    x, weight = made(num_tokens, num_in, num_rows, kernel_device)
    bias = weight[:, 0].contiguous() if num_rows > 10 else None
    counts = tile_counts(weight)
    for _ in range(2):  # the second finds what the first has left
        expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        check(skinny_linear(x, weight, bias, counts), expected)
        assert not counts.any()
    residual = functional.linear(x, weight).flip(-1)
    check(skinny_linear(x, weight, bias, counts, residual), expected + residual.double())


@TOKENS
@pytest.mark.parametrize(("num_in", "num_rows"), [(512, 32), (200, 2 * WIDE_O), (72, 12)])
def test_gated_linear_equals_torch_s(kernel_device: str, num_in: int, num_rows: int, num_tokens: int) -> None:
    x, weight = made(num_tokens, num_in, num_rows, kernel_device)
    gate, up = functional.linear(x.double(), weight.double()).chunk(2, -1)
    check(skinny_gated_linear(x, weight), functional.silu(gate) * up)


def test_every_way_to_cut_is_tried_above(kernel_device: str) -> None:
    if kernel_device != "cpu":
        pytest.skip("shapes are chosen for the interpreter's device")
    num_programs = num_multiprocessors(torch.device("cpu"))

    def cut(num_tokens: int, num_in: int, num_rows: int, *, is_gated: bool = False) -> tuple[int, int, int] | None:
        tiling = choose_tiling(num_tokens, num_in, num_rows, num_programs, is_gated=is_gated)
        return None if tiling is None else (tiling.block_o, tiling.num_groups, tiling.num_splits)

    assert cut(8, 600, 96) == (16, 4, 1)
    assert cut(16, 600, 96) == (16, 2, 1)
    assert cut(16, 256, 128) == (SPLIT_O, 1, 1)
    assert cut(64, 1024, 64) == (SPLIT_O, 1, 2)
    assert cut(64, 600, 96) is None
    assert cut(16, 200, 2 * WIDE_O, is_gated=True) == cut(64, 200, 2 * WIDE_O, is_gated=True) == (WIDE_O, 1, 1)


def test_leading_dimensions_strides_and_no_tokens(kernel_device: str) -> None:
    x = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(1)).to(kernel_device, DTYPE)[:, :, :32]
    weight = torch.eye(32, device=kernel_device, dtype=DTYPE)
    counts = tile_counts(weight)
    torch.testing.assert_close(skinny_linear(x, weight, None, counts), x)
    assert skinny_linear(x[:0], weight, None, counts).shape == (0, 3, 32)
    assert skinny_gated_linear(x[:0], weight).shape == (0, 3, 16)
    check(skinny_gated_linear(x, weight), functional.silu(x[..., :16].double()) * x[..., 16:].double())


def test_the_operators_shapes(kernel_device: str) -> None:
    x, weight = made(6, 64, 128, kernel_device)
    x, tests = x.view(2, 3, 64), ("test_schema", "test_faketensor")
    operators = torch.ops.outrider
    torch.library.opcheck(
        operators.skinny_linear.default, (x, weight, weight[:, 0].contiguous(), tile_counts(weight)), test_utils=tests
    )
    torch.library.opcheck(operators.skinny_gated_linear.default, (x, weight), test_utils=tests)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 16, 17, 32, 33, 64])
def test_tiles_on_a_hopper(num_tokens: int, is_gated: bool) -> None:
    """Tiles fit into its shared memory, spans are cut where tiles end, and counts suffice."""
    for num_in, num_rows in (
        *((4096, 6144), (4096, 4096), (4096, 28_672), (14_336, 4096)),
        *((576, 960), (576, 576), (576, 3072), (1536, 576)),
        *((2048, 3072), (2048, 2048), (2048, 16_384), (8192, 2048), (3584, 4608), (18_944, 3584)),
    ):
        tiling = choose_tiling(num_tokens, num_in, num_rows, HOPPER, is_gated=is_gated)
        if tiling is None:
            continue
        nbytes = 2 * tiling.num_stages * tiling.num_groups * tiling.block_k * (tiling.block_o + tiling.block_t)
        assert nbytes <= 227 << 10
        assert tiling.block_t >= num_tokens
        if tiling.num_splits > 1:
            assert not is_gated
            assert tiling.block_o >= SPLIT_O
            assert num_in % (tiling.num_splits * tiling.block_k) == 0


def test_a_library_multiplies_where_it_is_as_fast() -> None:
    """The layers of Llama 8B, by numbers of tokens with a kernel of ours."""

    def largest(num_in: int, num_rows: int, *, is_gated: bool = False) -> int:
        return max(
            count
            for count in range(1, 2 * MAX_TOKENS)
            if choose_tiling(count, num_in, num_rows, HOPPER, is_gated=is_gated)
        )

    assert largest(4096, 6144) == 16
    assert largest(4096, 4096) == 32
    assert largest(14_336, 4096) == largest(4096, 28_672, is_gated=True) == MAX_TOKENS
    assert choose_tiling(1, 4096, 28_672, HOPPER, is_gated=False) is None
