"""Writing KV: the kernel against its twin, through Triton's interpreter where there is no GPU."""

import pytest
import torch
from torch import Tensor

from server.kernels import reference
from server.kernels.kv_write import write_kv

KV_HEADS, HEAD_DIM, BLOCK, NUM_BLOCKS = 3, 24, 16, 5


def blank_layer(device: str, dtype: torch.dtype) -> Tensor:
    """A layer of two, filled with 7."""
    return torch.full((NUM_BLOCKS, 2, KV_HEADS, BLOCK, 2 * HEAD_DIM), 7.0, device=device).to(dtype)[:, 1]


def random_kv(num_tokens: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[T, kv_heads, head_dim] views as a model makes them: heads outside, tokens inside."""
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (2, KV_HEADS, num_tokens, HEAD_DIM)
    kv = torch.randn(shape, generator=generator).to(dtype).to(device)
    return kv[0].transpose(0, 1), kv[1].transpose(0, 1)


def places(num_tokens: int, device: str) -> tuple[Tensor, Tensor]:
    """Distinct places outside block 0."""
    order = torch.randperm((NUM_BLOCKS - 1) * BLOCK, generator=torch.Generator().manual_seed(1))[:num_tokens]
    return (1 + order // BLOCK).to(device), (order % BLOCK).to(device)


@pytest.mark.parametrize("num_tokens", [0, 1, 37])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e5m2),
    ],
    ids=str,
)
def test_equals_the_twin(kernel_device: str, num_tokens: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    # Values that both types hold: the interpreter does not round to the nearest, as a GPU does.
    key, value = (x.to(kv_dtype).to(dtype) for x in random_kv(num_tokens, kernel_device, dtype))
    blocks, offsets = places(num_tokens, kernel_device)
    found, expected = (blank_layer(kernel_device, kv_dtype) for _ in range(2))
    write_kv(found, key, value, blocks, offsets)
    reference.write_kv(expected, key, value, blocks, offsets)
    assert torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.float8_e4m3fn], ids=str)
def test_what_cannot_be_stored(kernel_device: str, kv_dtype: torch.dtype) -> None:
    """NaN and infinity become 0; what is finite but too large becomes the largest number."""
    largest = torch.finfo(kv_dtype).max
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 1.5], device=kernel_device)
    stored = [0.0, 0.0, 0.0, min(1e30, largest), -min(1e30, largest), 1.5]
    key = values.repeat(HEAD_DIM // 6).expand(1, KV_HEADS, HEAD_DIM)
    layer = blank_layer(kernel_device, kv_dtype)
    twin = layer.clone()
    zero = torch.zeros(1, dtype=torch.int64, device=kernel_device)
    for write, target in ((write_kv, layer), (reference.write_kv, twin)):
        write(target, key, key, zero + 1, zero + 2)
        expected = torch.tensor(stored, device=kernel_device).repeat(2 * HEAD_DIM // 6).expand(KV_HEADS, -1)
        torch.testing.assert_close(target[1, :, 2].float(), expected, rtol=1e-6, atol=0)


def test_what_does_not_fit_is_refused(kernel_device: str) -> None:
    layer = blank_layer(kernel_device, torch.float32)
    key, value = random_kv(4, kernel_device, torch.float32)
    blocks, offsets = places(4, kernel_device)
    with pytest.raises(ValueError, match="do not fit each other"):
        write_kv(layer, key, value[:, :, :-1], blocks, offsets)
    with pytest.raises(ValueError, match="4 tokens need"):
        write_kv(layer, key, value, blocks[:3], offsets)
    with pytest.raises(ValueError, match="not contiguous"):
        write_kv(layer, key, value, blocks.repeat_interleave(2)[::2], offsets)
