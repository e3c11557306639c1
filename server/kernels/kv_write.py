"""Writing keys and values into their blocks, converted to the cache's type."""

import torch
from torch import Tensor

from server.kernels.jit import jit, next_power_of_2, tl


@jit(unspecialised=("blocks_ptr", "offsets_ptr"))
def _write_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    layer_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    stride_key_token: int,
    stride_key_head: int,
    stride_value_token: int,
    stride_value_head: int,
    stride_block: int,
    stride_kv_head: int,
    stride_slot: int,
    largest: float,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """All heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    mask = (head < NUM_HEADS) & (dim < HEAD_DIM)
    key = tl.load(key_ptr + token * stride_key_token + head * stride_key_head + dim, mask=mask, other=0.0)
    value = tl.load(value_ptr + token * stride_value_token + head * stride_value_head + dim, mask=mask, other=0.0)
    key, value = _storable(key, largest), _storable(value, largest)
    block, offset = tl.load(blocks_ptr + token).to(tl.int64), tl.load(offsets_ptr + token)
    target = layer_ptr + block * stride_block + offset * stride_slot + head * stride_kv_head + dim
    tl.store(target, key.to(layer_ptr.dtype.element_ty), mask=mask)
    tl.store(target + HEAD_DIM, value.to(layer_ptr.dtype.element_ty), mask=mask)


@jit()
def _storable(x: tl.tensor, largest: float) -> tl.tensor:
    """NaN and infinity as 0, what the cache's type cannot hold as the largest it can."""
    x = x.to(tl.float32)
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    return tl.minimum(tl.maximum(x, -largest), largest)


def write_kv(layer: Tensor, key: Tensor, value: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Store T tokens' keys and values; NaN and infinity become 0, which no reader's mask lets through.

    Args:
        layer: [num_blocks, kv_heads, block_size, 2 * head_dim], K then V, any strides but the last.
        key, value: [T, kv_heads, head_dim], last dimension contiguous.
        blocks, offsets: [T] integers; where two tokens name one place, as padding does, either may win.

    Raises: ValueError, before any launch.
    Twin: reference.write_kv.
    """
    num_tokens, num_heads, head_dim = key.shape
    if value.shape != key.shape or layer.shape[1] != num_heads or layer.shape[3] != 2 * head_dim:
        shapes = [tuple(x.shape) for x in (layer, key, value)]
        raise ValueError(f"layer, key and value do not fit each other: {shapes}")
    if not blocks.shape == offsets.shape == (num_tokens,):
        raise ValueError(f"{num_tokens} tokens need as many blocks and offsets")
    if any(x.stride(-1) != 1 for x in (layer, key, value, blocks, offsets)):
        raise ValueError("a last dimension is not contiguous")
    if num_tokens == 0:
        return
    _write_kernel[(num_tokens,)](
        key,
        value,
        layer,
        blocks,
        offsets,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        layer.stride(0),
        layer.stride(1),
        layer.stride(2),
        torch.finfo(layer.dtype).max,
        NUM_HEADS=num_heads,
        BLOCK_H=next_power_of_2(num_heads),
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
    )
