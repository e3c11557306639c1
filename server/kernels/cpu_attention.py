"""Paged attention and KV writes on the CPU: operators in C++, built when first loaded.

The result of a token depends on its own position, query and KV alone, bit for bit: not on the batch,
on how a prompt is cut into chunks, on how many drafts are verified with it, or on the number of threads.
cpu_attention_tile.h tells how.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from server.kernels.cpu_build import load_operators

SOURCE = Path(__file__).with_name("cpu_attention.cpp")
HEADERS = tuple(Path(__file__).with_name(name) for name in ("cpu_attention_tile.h", "cpu_multiply.h", "cpu_vector.h"))
DTYPES = (torch.float32, torch.bfloat16)
KV_DTYPES = (*DTYPES, torch.float8_e4m3fn)
HEAD_DIM_MULTIPLE = 16


def supports(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether there are operators for a model; its cache may have any of KV_DTYPES."""
    return dtype in DTYPES and head_dim % HEAD_DIM_MULTIPLE == 0


@functools.cache
def load(folder: Path) -> bool:
    """Make the operators available, in some seconds where `folder` does not hold them yet.

    Returns: False, after one line in the log that names the cause, where that is impossible.
    """
    if hasattr(torch.ops.outrider, "cpu_paged_attention"):
        return True
    if not load_operators(SOURCE, HEADERS, folder, "attention on the CPU will be slow"):
        return False
    torch.library.register_fake("outrider::cpu_write_kv", _fake_write_kv)
    torch.library.register_fake("outrider::cpu_paged_attention", _fake_paged_attention)
    return True


def write_kv(layer: Tensor, key: Tensor, value: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Store T tokens' keys and values, converted to the cache's type; NaN and infinity become 0.

    Args:
        layer: [num_blocks, kv_heads, block_size, 2 * head_dim], K then V, any strides but the last.
        key, value: [T, kv_heads, head_dim], last dimension contiguous.
        blocks, offsets: [T] int64; where two tokens name one place, as padding does, either may win.

    Raises: RuntimeError for shapes, strides and types that do not fit, and for places that do not exist.
    """
    torch.ops.outrider.cpu_write_kv(layer, key, value, blocks, offsets)


def paged_attention(
    query: Tensor,
    layer: Tensor,
    first_token: Tensor,
    num_query: Tensor,
    slots: Tensor,
    positions: Tensor,
    block_table: Tensor,
    scaling: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Attend each of N rows to its own blocks, causally: a token sees positions up to its own.

    K and V of the query tokens are in the blocks already.

    Args:
        query: [T, heads, head_dim], last dimension contiguous.
        layer: [num_blocks, kv_heads, block_size, 2 * head_dim], K then V, any strides but the last;
            block_size a multiple of 16.
        first_token, num_query: [N] int64; a row's tokens are flat tokens [first, first + num_query). Padding
            among them, of position 0, costs next to nothing.
        slots: [N] int64, each row's place in `block_table`.
        positions: [T] int64. block_table: [slots, blocks] int32 or int64.
        sliding_window: positions seen, the token's own included.
        softcap: logits become softcap * tanh(logits / softcap). sinks: [heads] float32, a logit without a value.
        starts: [slots] int64, the first position that is seen in each; None sees all. Blocks wholly below it are
            not read.

    Returns: [T, heads, head_dim], contiguous; 0 for tokens of no row, and for those that see nothing.
    Raises: RuntimeError for shapes, strides and types that do not fit, and for blocks that do not exist.
    Twin: reference.attention.
    """
    output: Tensor = torch.ops.outrider.cpu_paged_attention(
        query,
        layer,
        first_token,
        num_query,
        slots,
        positions,
        block_table,
        scaling,
        sliding_window,
        softcap,
        sinks,
        starts,
    )
    return output


def _fake_write_kv(layer: Tensor, key: Tensor, value: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    return None


def _fake_paged_attention(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)
