"""Paged attention: how its kernels are launched for a step. See attention_kernel."""

import math

import torch
from torch import Tensor

from server.kernels.attention_kernel import attention_kernel, merge_kernel
from server.kernels.attention_tiling import LONGEST_SPLIT, Splits, choose_splits, choose_tiling, fixed_tiling
from server.kernels.jit import ceil_div, next_power_of_2

_LOG2_E = math.log2(math.e)


def paged_attention(
    query: Tensor,
    layer: Tensor,
    out: Tensor,
    first_token: Tensor,
    num_query: Tensor,
    slots: Tensor,
    positions: Tensor,
    block_table: Tensor,
    max_num_query: int,
    context_bound: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    split_span: int | None = None,
    starts: Tensor | None = None,
    arrivals: Tensor | None = None,
) -> None:
    """Attend each of N rows to its own blocks, causally; never waits for the device.

    K and V of the query tokens are in the blocks already. Padding behind a row's tokens, in `num_query`
    or not, may be there: a token whose position is below the first of its row gets some finite output.

    Args:
        query: [T, heads, head_dim], last dimension contiguous.
        layer: [num_blocks, kv_heads, block_size, 2 * head_dim], K then V, any strides but the last; converted to
            the query's type as it is read.
        out: [T, heads, head_dim], written for the tokens of the N rows.
        first_token, num_query: [N] integers; a row's tokens are flat tokens [first, first + num_query). A row of 0
            is skipped.
        slots: [N] integers, each row's place in `block_table`.
        positions: [T] integers. block_table: [slots, blocks] integers.
        max_num_query: no row has more. context_bound: no position reaches it. Both decide how work is cut and may be
            as large as the caller likes to keep few shapes.
        sliding_window: positions seen, the token's own included. softcap: as in reference.attention.
        sinks: [heads], a logit without a value.
        split_span: positions per split, a multiple of 128. A token's output then has the same bits whatever is in the
            batch, in its tile and in the bounds; None splits by shape and by length.
        starts: [slots] integers, the first position that is seen in each; None sees all. A token that sees nothing
            gets 0.
        arrivals: int32, N * heads of them are enough for short queries, all zero before and after a launch. Given
            them, the last program of a split row to end merges what they found; None takes a second launch for it,
            which is faster where every row is split over several programs. Launches that may run at the same time
            must not share them.

    Raises: ValueError, before any launch.
    Twin: reference.paged_attention.
    """
    _check(query, layer, out, first_token, num_query, slots, positions, block_table, sinks, starts)
    if split_span is not None and (split_span <= 0 or split_span % 128):
        raise ValueError(f"split_span {split_span} is not a multiple of 128")
    if split_span is not None and arrivals is not None:
        raise ValueError("splits of a fixed span are merged by a second launch")
    num_rows, num_heads, head_dim = first_token.shape[0], query.shape[1], query.shape[2]
    num_kv_heads, block_size = layer.shape[1], layer.shape[2]
    if num_rows == 0 or max_num_query == 0:
        return
    group = num_heads // num_kv_heads
    num_tile_rows = max_num_query * group
    tiling = (
        choose_tiling(num_tile_rows, head_dim, query.dtype)
        if split_span is None
        else fixed_tiling(head_dim, query.dtype)
    )
    num_tiles = ceil_div(num_tile_rows, tiling.block_m)
    num_programs = num_tiles * num_kv_heads * num_rows
    if split_span is None:
        splits = choose_splits(
            num_programs, num_programs // num_rows, max_num_query, context_bound, tiling.block_n, query.device
        )
    else:
        num_splits = next_power_of_2(ceil_div(context_bound, split_span))
        splits = Splits(num_splits, num_splits)
    if arrivals is not None and arrivals.numel() < num_programs:
        raise ValueError(f"{arrivals.numel()} arrivals for {num_programs} tiles of heads and rows")
    is_merged_here = arrivals is not None
    is_split = splits.most > 1 or is_merged_here
    partial = lse = query  # never touched unless split
    if is_split:
        shape = (num_rows * max_num_query, num_heads, splits.most)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    scale = scaling * _LOG2_E if softcap is None else scaling * 2 * _LOG2_E / softcap
    block_d = max(16, next_power_of_2(head_dim))
    attention_kernel[(num_programs * splits.most,)](
        query,
        layer,
        out,
        query if sinks is None else sinks,
        partial,
        lse,
        slots if arrivals is None else arrivals,
        first_token,
        num_query,
        slots,
        positions,
        slots if starts is None else starts,
        block_table,
        num_rows,
        num_tiles,
        splits.most,
        splits.fewest,
        max_num_query,
        scale,
        0.0 if softcap is None else softcap * _LOG2_E,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        layer.stride(0),
        layer.stride(1),
        layer.stride(2),
        block_table.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_SIZE=block_size,
        WINDOW=sliding_window or 0,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_STARTS=starts is not None,
        IS_SPLIT=is_split,
        SPLIT_SPAN=split_span or 0,
        LONGEST=LONGEST_SPLIT // tiling.block_n,
        IS_MERGED_HERE=is_merged_here,
        LOG2_E=_LOG2_E,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        # Tiles with a mask and tiles without are different code, in which products and sums are fused differently.
        enable_fp_fusion=split_span is None,
    )
    if is_split and not is_merged_here:
        merge_kernel[(num_rows * max_num_query, num_heads)](
            partial,
            lse,
            out,
            first_token,
            num_query,
            max_num_query,
            out.stride(0),
            out.stride(1),
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            NUM_SPLITS=splits.most,
            HAS_STARTS=starts is not None,
            IS_ORDERED=split_span is not None,
            enable_fp_fusion=split_span is None,
        )


def _check(
    query: Tensor,
    layer: Tensor,
    out: Tensor,
    first_token: Tensor,
    num_query: Tensor,
    slots: Tensor,
    positions: Tensor,
    block_table: Tensor,
    sinks: Tensor | None,
    starts: Tensor | None,
) -> None:
    """Raises: ValueError for shapes and strides that the kernel would misread."""
    num_tokens, num_heads, head_dim = query.shape
    problems = (
        (layer.dim() != 4 or layer.shape[3] != 2 * head_dim, "the layer holds no K and V of it"),
        (num_heads % layer.shape[1] != 0, "the layer's KV heads do not divide its heads"),
        (out.shape != query.shape, "out is not of its shape"),
        (any(x.stride(-1) != 1 for x in (query, layer, out, block_table)), "a last dimension is not contiguous"),
        (not first_token.shape == num_query.shape == slots.shape, "first_token, num_query and slots differ in length"),
        (positions.shape != (num_tokens,), "positions is not one per token"),
        (any(not x.is_contiguous() for x in (first_token, num_query, slots, positions)), "an index has gaps"),
        (sinks is not None and sinks.shape != (num_heads,), "sinks is not one per head"),
        (starts is not None and starts.shape != block_table.shape[:1], "starts is not one per slot"),
    )
    for is_wrong, description in problems:
        if is_wrong:
            shapes = ", ".join(str(tuple(x.shape)) for x in (layer, out, positions))
            raise ValueError(
                f"paged attention of a query {tuple(query.shape)}: {description} (layer, out, positions: {shapes})"
            )
