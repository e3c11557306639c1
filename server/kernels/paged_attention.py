"""Attention of many rows, each over its own KV blocks: one kernel for one token and for thousands.

The query tokens of a row and the query heads that share a KV head are laid out as the rows of one
matrix, token by token, so that a KV tile is read once for all of them:

    index  0           1           ...  G - 1       G           ...      G = heads / kv_heads
           token 0     token 0          token 0     token 1
           head 0      head 1           head G - 1  head 0

A program takes BLOCK_M of those rows of one sequence and one KV head, and goes through the positions
they see, BLOCK_N at a time, with a running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867;
Dao 2023, arXiv:2307.08691). Where that gives too few programs to fill the device, or a row is long, the
positions are split among several (flash-decoding). What they found is merged by a second kernel, or,
where few rows are split, by the last of them to end. All that depends on lengths is read on the device: a
launch depends on shapes alone and can be captured.
"""

import math
from typing import Any

import torch
from torch import Tensor

from server.kernels.attention_tiling import LONGEST_SPLIT, Splits, choose_splits, choose_tiling, fixed_tiling
from server.kernels.jit import ceil_div, jit, next_power_of_2, tl

_LOG2_E = math.log2(math.e)


@jit()
def _attend_tiles(
    maximum: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    query: tl.tensor,
    position: tl.tensor,
    first: tl.tensor,
    begin: int,
    end: int,
    kv_ptr: tl.tensor,
    table_ptr: tl.tensor,
    stride_block: int,
    stride_slot: int,
    scale: float,
    softcap: float,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take the positions [begin, end) into the running maximum (of powers of 2), sum and weighted values.

    Unmasked tiles are those that every query row sees in full. With starts, nothing below `first` is seen.
    """
    dim = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        if IS_MASKED:
            is_there = place < end
            if HAS_STARTS:
                is_there = is_there & (place >= first)
            block = tl.load(table_ptr + place // BLOCK_SIZE, mask=is_there, other=0)
        else:
            block = tl.load(table_ptr + place // BLOCK_SIZE)
        offset = block.to(tl.int64) * stride_block + (place % BLOCK_SIZE) * stride_slot
        pointer = kv_ptr + offset[:, None] + dim[None, :]
        if IS_MASKED:
            is_loaded = is_there[:, None] & (dim < HEAD_DIM)[None, :]
            key = tl.load(pointer, mask=is_loaded, other=0.0)
            value = tl.load(pointer + HEAD_DIM, mask=is_loaded, other=0.0)
        elif HEAD_DIM < BLOCK_D:
            key = tl.load(pointer, mask=(dim < HEAD_DIM)[None, :], other=0.0)
            value = tl.load(pointer + HEAD_DIM, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        else:
            key = tl.load(pointer)
            value = tl.load(pointer + HEAD_DIM)
        score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="tf32x3") * scale
        if HAS_SOFTCAP:  # `scale` makes score / softcap times 2 log2 e here: tanh(x) = 1 - 2 / (1 + e^2x)
            score = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(score)))
        if IS_MASKED:
            is_seen = place[None, :] <= position[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (place[None, :] > position[:, None] - WINDOW)
            if HAS_STARTS:
                is_seen = is_seen & (place[None, :] >= first)
            score = tl.where(is_seen, score, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        # A row may have seen nothing yet: minus infinity less itself would be NaN.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp2(score - shift[:, None])
        decay = tl.exp2(maximum - shift)
        total = total * decay + tl.sum(weight, 1)
        values = values * decay[:, None]
        value = value.to(query.dtype)
        values = tl.dot(weight.to(query.dtype), value, values, input_precision="tf32x3")
        maximum = new_maximum
    return maximum, total, values


@jit()
def _merge_parts(
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    first: tl.tensor,
    num_parts: int,
    is_row: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tl.tensor:
    """Weigh what other programs of this launch left behind `first`, in order: [BLOCK_M, BLOCK_D]."""
    dim = tl.arange(0, BLOCK_D)
    is_element = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    merged = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in range(num_parts):
        place = first + part
        # Not from the cache of this multiprocessor, which does not see what others write.
        lse = tl.load(lse_ptr + place, mask=is_row, other=float("-inf"), cache_modifier=".cg")
        pointer = partial_ptr + place[:, None] * HEAD_DIM + dim[None, :]
        values = tl.load(pointer, mask=is_element, other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, lse)
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # nothing seen yet, as in _attend_tiles
        weight, decay = tl.exp2(lse - shift), tl.exp2(maximum - shift)
        total = total * decay + weight
        merged = merged * decay[:, None] + values * weight[:, None]
        maximum = new_maximum
    return merged / tl.where(total == 0.0, 1.0, total)[:, None]


@jit(
    unspecialised=(
        *("first_token_ptr", "num_query_ptr", "slots_ptr", "positions_ptr", "starts_ptr"),
        *("num_rows", "num_tiles", "num_splits", "fewest_splits", "max_num_query"),
    )
)
def _attention_kernel(
    query_ptr: tl.tensor,
    layer_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    first_token_ptr: tl.tensor,
    num_query_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    table_ptr: tl.tensor,
    num_rows: int,
    num_tiles: int,
    num_splits: int,
    fewest_splits: int,
    max_num_query: int,
    scale: float,
    softcap: float,
    stride_query_token: int,
    stride_query_head: int,
    stride_out_token: int,
    stride_out_head: int,
    stride_block: int,
    stride_kv_head: int,
    stride_slot: int,
    stride_table: int,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SPLIT_SPAN: tl.constexpr,
    LONGEST: tl.constexpr,
    IS_MERGED_HERE: tl.constexpr,
    LOG2_E: tl.constexpr,
) -> None:
    """Program of a tile, KV head, row and split; see the module's docstring."""
    program = tl.program_id(0)
    # Tiles at the end of a prompt see the most: they start first.
    tile = num_tiles - 1 - program % num_tiles
    kv_head = program // num_tiles % KV_HEADS
    # The splits that only a long row uses start last: those of short rows leave while others work.
    row = program // (num_tiles * KV_HEADS) % num_rows
    split = program // (num_tiles * KV_HEADS) // num_rows
    num_query = tl.load(num_query_ptr + row).to(tl.int32)
    if tile * BLOCK_M >= num_query * GROUP:
        return
    first_token = tl.load(first_token_ptr + row).to(tl.int64)
    index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = index // GROUP, kv_head * GROUP + index % GROUP
    is_row = token < num_query
    dim = tl.arange(0, BLOCK_D)
    is_element = is_row[:, None] & (dim < HEAD_DIM)[None, :]

    # Padding behind a row has position 0; left there it would stretch a sliding window to the beginning.
    first_position = tl.load(positions_ptr + first_token).to(tl.int32)
    position = tl.load(positions_ptr + first_token + token, mask=is_row, other=0).to(tl.int32)
    position = tl.maximum(position, first_position)
    end = tl.max(position, 0) + 1
    lowest = tl.min(tl.where(is_row, position, end), 0)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(lowest + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    first = 0
    if HAS_STARTS:
        first = tl.load(starts_ptr + tl.load(slots_ptr + row)).to(tl.int32)
        begin = tl.minimum(tl.maximum(begin, first // BLOCK_N * BLOCK_N), end)
    if SPLIT_SPAN > 0:
        begin = tl.maximum(begin, split * SPLIT_SPAN)
        end = tl.minimum(end, (split + 1) * SPLIT_SPAN)
    elif IS_SPLIT:
        count = (end - begin + BLOCK_N - 1) // BLOCK_N
        wanted = tl.minimum(tl.maximum(fewest_splits, (count + LONGEST - 1) // LONGEST), num_splits)
        span = tl.maximum((count + wanted - 1) // wanted, 1) * BLOCK_N
        num_parts = tl.maximum((end - begin + span - 1) // span, 1)
        begin = begin + split * span
        end = tl.minimum(begin + span, end)
    if IS_SPLIT:
        place = ((row * max_num_query + token) * (KV_HEADS * GROUP) + head).to(tl.int64) * num_splits + split
        if IS_MERGED_HERE:
            has_nothing = split >= num_parts
        else:
            has_nothing = begin >= end
            if HAS_SINKS:
                has_nothing = has_nothing & (split > 0)
        if has_nothing:  # most splits of short rows: launches are cut for the longest context
            if not IS_MERGED_HERE:
                tl.store(lse_ptr + place, float("-inf"), mask=is_row)
            return
    # Positions below `full_end` are seen by every query row. With a sink alone, a split's end is not above begin.
    full_end = begin
    if WINDOW == 0 and not HAS_STARTS:
        full_end = tl.maximum(begin, tl.minimum(end, lowest + 1) // BLOCK_N * BLOCK_N)

    pointer = query_ptr + (first_token + token)[:, None] * stride_query_token + head[:, None] * stride_query_head
    query = tl.load(pointer + dim[None, :], mask=is_element, other=0.0)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:  # a logit without a value: where the running softmax starts
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        maximum = tl.where(split == 0, sink, maximum)
        total = tl.where(split == 0, total + 1.0, total)
    values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    kv_ptr = layer_ptr + kv_head.to(tl.int64) * stride_kv_head
    row_table_ptr = table_ptr + tl.load(slots_ptr + row).to(tl.int64) * stride_table
    if WINDOW == 0 and not HAS_STARTS:
        maximum, total, values = _attend_tiles(
            maximum, total, values, query, position, first, begin, full_end, kv_ptr, row_table_ptr, stride_block,
            stride_slot, scale, softcap, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, HAS_STARTS, False,
        )  # fmt: skip
    maximum, total, values = _attend_tiles(
        maximum, total, values, query, position, first, full_end, end, kv_ptr, row_table_ptr, stride_block,
        stride_slot, scale, softcap, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, HAS_STARTS, True,
    )  # fmt: skip

    total = tl.where(total == 0.0, 1.0, total)  # where nothing was seen, the maximum is minus infinity
    values = values / total[:, None]
    if IS_SPLIT and not IS_MERGED_HERE:
        tl.store(lse_ptr + place, maximum + tl.log2(total), mask=is_row)
        tl.store(partial_ptr + place[:, None] * HEAD_DIM + dim[None, :], values, mask=is_element)
    else:
        if IS_MERGED_HERE and num_parts > 1:
            tl.store(lse_ptr + place, maximum + tl.log2(total), mask=is_row)
            tl.store(partial_ptr + place[:, None] * HEAD_DIM + dim[None, :], values, mask=is_element)
            tl.debug_barrier()  # all threads have stored before one of them says so
            arrivals_ptr += (row * KV_HEADS + kv_head) * num_tiles + tile
            is_last = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == num_parts - 1
            is_element = (token < tl.where(is_last, num_query, 0))[:, None] & (dim < HEAD_DIM)[None, :]
            if is_last:
                tl.store(arrivals_ptr, 0)
                place -= split
                values = _merge_parts(partial_ptr, lse_ptr, place, num_parts, is_row, HEAD_DIM, BLOCK_D, BLOCK_M)
        pointer = out_ptr + (first_token + token)[:, None] * stride_out_token + head[:, None] * stride_out_head
        tl.store(pointer + dim[None, :], values.to(out_ptr.dtype.element_ty), mask=is_element)


@jit(unspecialised=("first_token_ptr", "num_query_ptr", "max_num_query"))
def _merge_kernel(
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_token_ptr: tl.tensor,
    num_query_ptr: tl.tensor,
    max_num_query: int,
    stride_out_token: int,
    stride_out_head: int,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    IS_ORDERED: tl.constexpr,
) -> None:
    """Weigh the splits of one token of one row (axis 0) and one head (axis 1) by their sums.

    In order, the result does not depend on how many empty splits there are.
    """
    row, token, head = tl.program_id(0) // max_num_query, tl.program_id(0) % max_num_query, tl.program_id(1)
    if token >= tl.load(num_query_ptr + row):
        return
    first = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * NUM_SPLITS
    place = first + tl.arange(0, NUM_SPLITS)
    dim = tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + place)
    maximum = tl.max(lse, 0)  # a token that sees itself has a split above minus infinity
    if HAS_STARTS:
        maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    if IS_ORDERED:
        merged, total = tl.zeros([BLOCK_D], tl.float32), 0.0
        for split in range(NUM_SPLITS):
            split_lse = tl.load(lse_ptr + first + split)
            if split_lse > float("-inf"):  # the others wrote nothing
                weight = tl.exp2(split_lse - maximum)
                values = tl.load(partial_ptr + (first + split) * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
                merged += values * weight
                total += weight
    else:
        weight = tl.exp2(lse - maximum)
        is_element = (lse > float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :]
        values = tl.load(partial_ptr + place[:, None] * HEAD_DIM + dim[None, :], mask=is_element, other=0.0)
        merged, total = tl.sum(values * weight[:, None], 0), tl.sum(weight, 0)
    if HAS_STARTS:
        total = tl.where(total == 0.0, 1.0, total)
    merged = merged / total
    first_token = tl.load(first_token_ptr + row).to(tl.int64)
    pointer = out_ptr + (first_token + token) * stride_out_token + head * stride_out_head + dim
    tl.store(pointer, merged.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


@torch.library.custom_op("outrider::paged_attention", mutates_args=("out",))
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
    _attention_kernel[(num_programs * splits.most,)](
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
        _merge_kernel[(num_rows * max_num_query, num_heads)](
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


@paged_attention.register_fake
def _(*_: Any, **__: Any) -> None:
    return None


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
        (layer.dim() != 4 or layer.shape[3] != 2 * head_dim, f"layer {tuple(layer.shape)} holds no K and V of it"),
        (num_heads % layer.shape[1] != 0, f"{layer.shape[1]} KV heads do not divide its heads"),
        (out.shape != query.shape, f"out is {tuple(out.shape)}"),
        (any(x.stride(-1) != 1 for x in (query, layer, out, block_table)), "a last dimension is not contiguous"),
        (not first_token.shape == num_query.shape == slots.shape, "first_token, num_query and slots differ in length"),
        (positions.shape != (num_tokens,), f"positions is {tuple(positions.shape)}"),
        (any(not x.is_contiguous() for x in (first_token, num_query, slots, positions)), "an index has gaps"),
        (sinks is not None and sinks.shape != (num_heads,), "sinks is not one per head"),
        (starts is not None and starts.shape != block_table.shape[:1], "starts is not one per slot"),
    )
    for is_wrong, description in problems:
        if is_wrong:
            raise ValueError(f"paged attention of a query {tuple(query.shape)}: {description}")
