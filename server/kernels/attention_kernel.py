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

from server.kernels.jit import jit, tl


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
        *("arrivals_ptr", "first_token_ptr", "num_query_ptr", "slots_ptr", "positions_ptr", "starts_ptr"),
        *("num_rows", "num_tiles", "num_splits", "fewest_splits", "max_num_query"),
    ),
    is_slow_to_compile=True,
)
def attention_kernel(
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


@jit(unspecialised=("first_token_ptr", "num_query_ptr", "max_num_query"), is_slow_to_compile=True)
def merge_kernel(
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
