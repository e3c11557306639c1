"""Layers whose rows do not depend on each other, against torch's own; interpreted where there is no GPU.

That bits are the same is a property of a device's instructions: tests/gpu/test_invariance.py.
"""

import pytest
import torch

from server.kernels.invariant_linear import MIN_SPAN, NARROW_O, choose_tiling, invariant_linear, span_of
from server.kernels.invariant_mean import MAX_BLOCK, invariant_mean

MAX_ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of a result of about 1 that is rounded to the type."""


SHAPES = [(2 * MIN_SPAN, NARROW_O), (MIN_SPAN + 40, 2 * NARROW_O + 6), (24, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter multiplies no bfloat16
@pytest.mark.parametrize("num_tokens", [1, 17, 70, 300])
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_linear_equals_torch_s(
    kernel_device: str, num_in: int, num_out: int, num_tokens: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, num_in, generator=generator).to(kernel_device, dtype)
    weight = torch.randn(num_out + 1, num_in, generator=generator).to(kernel_device, dtype)[1:] / num_in**0.5
    bias = torch.randn(num_out, generator=generator).to(kernel_device, dtype) if num_out > 1 else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = invariant_linear(x, weight, bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=MAX_ERROR[dtype], atol=MAX_ERROR[dtype])


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 65, 256, 257, 8192])
@pytest.mark.parametrize("dtype", MAX_ERROR, ids=str)
def test_tiles_fit_spans(dtype: torch.dtype, num_tokens: int) -> None:
    """Else a tile would reach into the next span's sum."""
    assert MIN_SPAN % choose_tiling(num_tokens, dtype).block_k == 0
    for num_in, num_out in ((4096, 4096), (14336, 4096), (576, 960), (4096, 128_256), (24, 5)):
        assert span_of(num_in, num_out) % MIN_SPAN == 0


def test_leading_dimensions_and_strides(kernel_device: str) -> None:
    x = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(1)).to(kernel_device)[:, :, :32]
    weight = torch.eye(32, 64, device=kernel_device)[:, :32]
    torch.testing.assert_close(invariant_linear(x, weight), x)
    assert invariant_linear(x[:0], weight).shape == (0, 3, 32)
    assert invariant_mean(x[:0]).shape == (0, 3, 1)


@pytest.mark.parametrize("dtype", MAX_ERROR, ids=str)
@pytest.mark.parametrize("width", [1, 576, MAX_BLOCK, 3 * MAX_BLOCK + 1])
def test_mean_equals_torch_s(kernel_device: str, width: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, width + 2, generator=torch.Generator().manual_seed(width)).to(kernel_device, dtype)[..., 2:]
    found = invariant_mean(x)
    assert found.dtype == dtype
    expected = x.double().mean(-1, keepdim=True)
    torch.testing.assert_close(found.double(), expected, rtol=MAX_ERROR[dtype], atol=MAX_ERROR[dtype])


def test_what_does_not_fit_is_refused(kernel_device: str) -> None:
    x, weight = torch.randn(3, 8, device=kernel_device), torch.randn(5, 8, device=kernel_device)
    with pytest.raises(ValueError, match="do not fit"):
        invariant_linear(x[:, 1:], weight)
    with pytest.raises(ValueError, match="one floating point type"):
        invariant_linear(x, weight.half())
    with pytest.raises(ValueError, match="not contiguous"):
        invariant_linear(x, weight.T.contiguous().T)
    with pytest.raises(ValueError, match="no mean"):
        invariant_mean(x.T)
