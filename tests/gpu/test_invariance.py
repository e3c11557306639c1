"""What `--batch-invariant` rests on: a token's bits do not depend on the tokens beside it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from server.kernels.gumbel_argmax import gumbel_argmax
from server.kernels.invariant_linear import invariant_linear
from server.kernels.invariant_mean import invariant_mean
from server.kernels.noise import Stream

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BATCHES = [1, 2, 8, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256, 257, 500, 1000, 2048]
"""Numbers of tokens on every side of a change of tiling."""

MAX_ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Largest |out - expected| / |expected| (Frobenius), against float64; see test_kernels.MAX_ERROR."""

LINEARS = [
    ("8B, q k v", 4096, 6144, torch.bfloat16),
    ("8B, out", 4096, 4096, torch.bfloat16),
    ("8B, gate up", 4096, 28_672, torch.bfloat16),
    ("8B, down", 14_336, 4096, torch.bfloat16),
    ("SmolLM2, q k v", 576, 960, torch.bfloat16),
    ("SmolLM2, down", 1536, 576, torch.bfloat16),
    ("SmolLM2, head", 576, 49_152, torch.bfloat16),
    ("no multiple of anything", 1000, 999, torch.bfloat16),
    ("float16", 4096, 4096, torch.float16),
    ("SmolLM2, q k v in float32", 576, 960, torch.float32),
    ("SmolLM2, down in float32", 1536, 576, torch.float32),
    ("8B, out in float32", 4096, 4096, torch.float32),
]


def check_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compare every batch with the longest, and a row from its middle. Returns: the longest's result."""
    longest = function(x)
    for count in BATCHES:
        assert torch.equal(function(x[:count]), longest[:count]), f"{count} rows differ from {x.shape[0]}"
    assert torch.equal(function(x[77:78]), longest[77:78])
    return longest


@pytest.mark.parametrize(("name", "num_in", "num_out", "dtype"), LINEARS, ids=lambda value: str(value))
def test_linear(name: str, num_in: int, num_out: int, dtype: torch.dtype) -> None:
    generator = torch.Generator(DEVICE).manual_seed(num_in)
    x = torch.randn(8192, num_in, generator=generator, device=DEVICE).to(dtype)
    weight = (torch.randn(num_out, num_in, generator=generator, device=DEVICE) / num_in**0.5).to(dtype)
    bias = torch.randn(num_out, generator=generator, device=DEVICE).to(dtype)
    found = check_rows(lambda rows: invariant_linear(rows, weight, bias), x)[:512].double()
    expected = functional.linear(x[:512].double(), weight.double(), bias.double())
    error = float((found - expected).norm() / expected.norm())
    assert error < MAX_ERROR[dtype], f"{name}: {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [576, 4096, 5000])
def test_row_by_row(width: int, dtype: torch.dtype) -> None:
    """The mean is ours, as torch's is not invariant; the others are torch's."""
    x = torch.randn(8192, width, device=DEVICE).to(dtype)
    weight = torch.rand(width, device=DEVICE).to(dtype)
    expected = x[:100].double().mean(-1, keepdim=True)
    torch.testing.assert_close(check_rows(invariant_mean, x)[:100].double(), expected, rtol=1e-2, atol=1e-6)
    check_rows(lambda rows: functional.layer_norm(rows, (width,), weight, weight), x)
    check_rows(lambda rows: rows.softmax(-1), x)
    check_rows(lambda rows: functional.embedding(rows[:, 0].abs().mul(1000).long(), x), x)


def test_sampling() -> None:
    logits = torch.randn(2048, 1, 50_000, device=DEVICE)
    key, temperature = torch.arange(2048, device=DEVICE), torch.full((2048,), 0.7, device=DEVICE)
    longest = gumbel_argmax(logits, key, key, temperature, Stream.TARGET)
    for count in BATCHES:
        found = gumbel_argmax(logits[:count], key[:count], key[:count], temperature[:count], Stream.TARGET)
        assert all(torch.equal(a, b[:count]) for a, b in zip(found, longest, strict=True)), f"{count} rows"
