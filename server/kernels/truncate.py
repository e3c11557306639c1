"""Temperature, min-p, top-k and top-p, without a sort.

What a row keeps is what reaches a threshold, ties included: its k-th largest value, or the largest value with
at least `top_p` of the mass at or above it. The threshold is found in three launches:

1. Survey: every 32 values make a group, of which the largest value and the mass are noted.
2. Search: the groups' notes give a lower bound of the threshold that is proven, and few groups, mostly, reach above
   it. Among their values the threshold itself is searched, over the bits of its float32.
3. Apply: what is below the threshold becomes minus infinity.

A row is treated alike in every batch: its sums have one order, whatever the number of rows.
"""

import torch
from torch import Tensor

from server.kernels.jit import ceil_div, jit, next_power_of_2, num_multiprocessors, tl

LANES, MEMBERS = 128, 32
"""A part of the vocabulary is a tile of so many groups of so many values; a group is a column of it, as likely tokens
have neighbouring ids."""
BLOCK_G = 64
"""Groups whose values stay in registers during a search."""
NUM_BOUNDS = 4
"""Bounds that are tried at once: a step of a search leaves a fifth of what it was given."""
NUM_BOUND_STEPS = 7
"""Steps towards the lower bound, which may be loose: to 1/128 of its value."""
PROGRAMS_PER_MULTIPROCESSOR = 16


@jit()
def _is_cut(
    slot: tl.tensor, min_p_ptr: tl.tensor, top_k_ptr: tl.tensor, top_p_ptr: tl.tensor, vocab_size: int
) -> tl.tensor:
    """Whether a slot's parameters leave anything out."""
    top_k = tl.load(top_k_ptr + slot)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    return has_top_k | (tl.load(min_p_ptr + slot) > 0) | (tl.load(top_p_ptr + slot) < 1)


@jit()
def _to_key(value: tl.tensor) -> tl.tensor:
    """A float32 as an int64 in the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@jit()
def _to_value(key: tl.tensor) -> tl.tensor:
    """The float32 of a key; minus infinity for the one below its own."""
    key = tl.maximum(key, -2139095041).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@jit()
def _between(low: tl.tensor, high: tl.tensor, NUM_BOUNDS: tl.constexpr) -> tl.tensor:
    """Keys that divide what is between two; all above the lower one."""
    return low + tl.maximum((high - low) * (tl.arange(0, NUM_BOUNDS) + 1) // (NUM_BOUNDS + 1), 1)


@jit()
def _load_values(
    row_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    start: tl.tensor,
    num_groups: tl.tensor,
    temperature: tl.tensor,
    vocab_size: int,
    LANES: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> tl.tensor:
    """The values of BLOCK_G listed groups, [MEMBERS * BLOCK_G]; minus infinity where there is none."""
    index = tl.arange(0, MEMBERS * BLOCK_G)
    place = start + index % BLOCK_G  # neighbours in the list are neighbours in memory where all are listed
    group = tl.load(groups_ptr + place, mask=place < num_groups, other=0)
    token_id = group // LANES * (LANES * MEMBERS) + group % LANES + index // BLOCK_G * LANES
    is_value = (place < num_groups) & (token_id < vocab_size)
    return tl.math.div_rn(tl.load(row_ptr + token_id, mask=is_value, other=float("-inf")), temperature)


@jit()
def _store_near(
    near_ptr: tl.tensor,
    bound: tl.tensor,
    row_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    num_groups: tl.tensor,
    temperature: tl.tensor,
    vocab_size: int,
    LANES: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> tl.tensor:
    """Copy the listed values above a bound, the first MEMBERS * BLOCK_G of them. Returns: how many there are."""
    num_near = tl.full([], 0, tl.int32)
    for start in range(0, num_groups, BLOCK_G):
        values = _load_values(row_ptr, groups_ptr, start, num_groups, temperature, vocab_size, LANES, MEMBERS, BLOCK_G)
        is_near = (values > bound).to(tl.int32)
        place = num_near + tl.cumsum(is_near, 0) - 1
        tl.store(near_ptr + place, values, mask=(is_near > 0) & (place < MEMBERS * BLOCK_G))
        num_near += tl.sum(is_near, 0)
    return num_near


@jit()
def _sum_above(
    bounds: tl.tensor,
    highest: tl.tensor,
    values: tl.tensor,
    row_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    num_groups: tl.tensor,
    temperature: tl.tensor,
    vocab_size: int,
    IS_MASS: tl.constexpr,
    LANES: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> tl.tensor:
    """For each bound, the number of listed values above it, or their mass in units of the highest's.

    Args: values: those of the first groups, which stay in registers.
    """
    weights = tl.exp(values - highest) if IS_MASS else tl.full(values.shape, 1.0, tl.float32)
    above = tl.where(values[:, None] > bounds[None, :], weights[:, None], 0.0)
    for start in range(BLOCK_G, num_groups, BLOCK_G):
        more = _load_values(row_ptr, groups_ptr, start, num_groups, temperature, vocab_size, LANES, MEMBERS, BLOCK_G)
        weights = tl.exp(more - highest) if IS_MASS else weights
        above += tl.where(more[:, None] > bounds[None, :], weights[:, None], 0.0)
    return tl.sum(above, 0)


@jit()
def _search(
    low: tl.tensor,
    limit: tl.tensor,
    highest: tl.tensor,
    values: tl.tensor,
    row_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    num_groups: tl.tensor,
    temperature: tl.tensor,
    vocab_size: int,
    IS_MASS: tl.constexpr,
    NUM_BOUNDS: tl.constexpr,
    LANES: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> tl.tensor:
    """The least float32 with less than `limit` above it; its key is above `low`."""
    high = _to_key(highest)
    while high - low > 1:
        middle = _between(low, high, NUM_BOUNDS)
        above = _sum_above(
            _to_value(middle), highest, values, row_ptr, groups_ptr, num_groups, temperature, vocab_size,
            IS_MASS, LANES, MEMBERS, BLOCK_G,
        )  # fmt: skip
        low = tl.max(tl.where(above >= limit, middle, low), 0)
        high = tl.min(tl.where(above >= limit, high, middle), 0)
    return _to_value(high)


@jit(unspecialised=("slots_ptr", "num_positions"))
def _survey_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    num_positions: int,
    vocab_size: int,
    stride_row: int,
    stride_position: int,
    num_parts: int,
    LANES: tl.constexpr,
    MEMBERS: tl.constexpr,
) -> None:
    """Note the groups of one position of one row (axis 0) in every n-th part of the vocabulary (axis 1)."""
    row, position = tl.program_id(0) // num_positions, tl.program_id(0) % num_positions
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    if (temperature == 0) | ~_is_cut(slot, min_p_ptr, top_k_ptr, top_p_ptr, vocab_size):
        return
    row_ptr = logits_ptr + row.to(tl.int64) * stride_row + position * stride_position
    lane = tl.arange(0, LANES)
    for part in range(tl.program_id(1), num_parts, tl.num_programs(1)):
        token_id = (part * MEMBERS + tl.arange(0, MEMBERS))[:, None] * LANES + lane[None, :]
        logits = tl.load(row_ptr + token_id, mask=token_id < vocab_size, other=float("-inf"))
        values = tl.math.div_rn(logits, temperature)
        values = tl.where(values == values, values, float("inf"))  # NaN must show
        highest = tl.max(values, 0)
        base = tl.where(tl.abs(highest) < float("inf"), highest, 0.0)
        place = (tl.program_id(0).to(tl.int64) * num_parts + part) * LANES + lane
        tl.store(highest_ptr + place, highest)
        tl.store(mass_ptr + place, tl.sum(tl.exp(tl.minimum(values - base[None, :], 0.0)), 0))


@jit(unspecialised=("slots_ptr", "num_positions"), is_slow_to_compile=True)
def _search_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    near_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    num_positions: int,
    vocab_size: int,
    stride_row: int,
    stride_position: int,
    num_parts: int,
    BLOCK_L: tl.constexpr,
    NUM_BOUNDS: tl.constexpr,
    NUM_BOUND_STEPS: tl.constexpr,
    LANES: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> None:
    """Find the threshold of one position of one row."""
    row, position = tl.program_id(0) // num_positions, tl.program_id(0) % num_positions
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    if (temperature == 0) | ~_is_cut(slot, min_p_ptr, top_k_ptr, top_p_ptr, vocab_size):
        return
    min_p, top_k, top_p = tl.load(min_p_ptr + slot), tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    group = tl.arange(0, BLOCK_L)
    is_group = group < num_parts * LANES
    base = tl.program_id(0).to(tl.int64) * num_parts * LANES
    group_highest = tl.load(highest_ptr + base + group, mask=is_group, other=float("-inf"))
    highest = tl.max(group_highest, 0)
    if (highest == float("inf")) | (highest == float("-inf")):  # broken, or nothing to choose: stays as it is
        tl.store(threshold_ptr + tl.program_id(0), float("-inf"))
        return
    threshold = tl.where(min_p > 0, highest + tl.log(tl.where(min_p > 0, min_p, 1.0)), float("-inf"))
    if ~(has_top_k | (top_p < 1)):
        tl.store(threshold_ptr + tl.program_id(0), threshold)
        return

    mass = tl.load(mass_ptr + base + group, mask=is_group, other=0.0) * tl.exp(group_highest - highest)
    total = tl.sum(mass, 0)
    low = _to_key(threshold) - 1
    if has_top_k | (min_p == 0):
        # The largest bound with `limit` proven to be above it. What a group has there is at least its highest, and
        # its mass less that of all others, were they at the bound.
        limit = tl.where(has_top_k, top_k.to(tl.float32), top_p * total * 1.00001)  # sums are rounded
        least = tl.where(has_top_k, 1.0, tl.exp(group_highest - highest))
        most = tl.where(has_top_k, 1.0, mass)
        num_others = tl.where(has_top_k, 0.0, MEMBERS - 1.0)
        low = tl.full([], -2139095042, tl.int64)
        high = _to_key(highest)
        for _ in range(NUM_BOUND_STEPS):
            middle = _between(low, high, NUM_BOUNDS)
            bounds = _to_value(middle)[None, :]
            proven = tl.maximum(least[:, None], most[:, None] - num_others * tl.exp(bounds - highest))
            above = tl.sum(tl.where(group_highest[:, None] > bounds, proven, 0.0), 0)
            low = tl.max(tl.where(above >= limit, middle, low), 0)
            high = tl.min(tl.where(above >= limit, high, middle), 0)

    is_listed = group_highest > _to_value(low)
    num_groups = tl.sum(is_listed.to(tl.int32), 0)
    place = tl.cumsum(is_listed.to(tl.int32), 0) - 1
    groups_ptr += base
    tl.store(groups_ptr + place, group, mask=is_listed)
    tl.debug_barrier()  # other threads read the list
    row_ptr = logits_ptr + row.to(tl.int64) * stride_row + position * stride_position
    values = _load_values(row_ptr, groups_ptr, 0, num_groups, temperature, vocab_size, LANES, MEMBERS, BLOCK_G)
    if num_groups > BLOCK_G:  # most of their values are below the bound: those above it may still fit into registers
        near_ptr += tl.program_id(0).to(tl.int64) * (MEMBERS * BLOCK_G)
        num_near = _store_near(
            near_ptr, _to_value(low), row_ptr, groups_ptr, num_groups, temperature, vocab_size, LANES, MEMBERS, BLOCK_G
        )
        tl.debug_barrier()
        if num_near <= MEMBERS * BLOCK_G:
            index = tl.arange(0, MEMBERS * BLOCK_G)
            values = tl.load(near_ptr + index, mask=index < num_near, other=float("-inf"))
            num_groups = tl.full([], 0, tl.int32)  # no more of them
    if has_top_k:
        kth = _search(
            low, top_k.to(tl.float32), highest, values, row_ptr, groups_ptr, num_groups, temperature, vocab_size,
            False, NUM_BOUNDS, LANES, MEMBERS, BLOCK_G,
        )  # fmt: skip
        threshold = tl.maximum(threshold, kth)
        low = _to_key(threshold) - 1
    if top_p < 1:
        if has_top_k | (min_p > 0):  # of what is left
            left = _sum_above(
                tl.full([NUM_BOUNDS], 0.0, tl.float32) + _to_value(low), highest, values, row_ptr, groups_ptr,
                num_groups, temperature, vocab_size, True, LANES, MEMBERS, BLOCK_G,
            )  # fmt: skip
            total = tl.max(left, 0)
        edge = _search(
            low, top_p * total, highest, values, row_ptr, groups_ptr, num_groups, temperature, vocab_size,
            True, NUM_BOUNDS, LANES, MEMBERS, BLOCK_G,
        )  # fmt: skip
        threshold = tl.maximum(threshold, edge)
    tl.store(threshold_ptr + tl.program_id(0), threshold)


@jit(unspecialised=("slots_ptr", "num_positions"))
def _apply_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    num_positions: int,
    vocab_size: int,
    stride_row: int,
    stride_position: int,
    BLOCK_V: tl.constexpr,
) -> None:
    """Divide one position of one row (axis 0), and cut it off, in every n-th part of the vocabulary (axis 1)."""
    row, position = tl.program_id(0) // num_positions, tl.program_id(0) % num_positions
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    is_cut = _is_cut(slot, min_p_ptr, top_k_ptr, top_p_ptr, vocab_size)
    if (temperature == 0) | ((temperature == 1) & ~is_cut):
        return
    threshold = tl.load(threshold_ptr + tl.program_id(0), mask=is_cut, other=float("-inf"))
    row_ptr = logits_ptr + row.to(tl.int64) * stride_row + position * stride_position
    for start in range(tl.program_id(1) * BLOCK_V, vocab_size, tl.num_programs(1) * BLOCK_V):
        token_id = start + tl.arange(0, BLOCK_V)
        values = tl.math.div_rn(tl.load(row_ptr + token_id, mask=token_id < vocab_size, other=0.0), temperature)
        tl.store(row_ptr + token_id, tl.where(values < threshold, float("-inf"), values), mask=token_id < vocab_size)


def truncate(logits: Tensor, slots: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Divide by the temperature, then mask what min-p, top-k and top-p leave out, in this order and in place.

    Ties at the k-th place are all kept, as are those at top-p's edge. A row with NaN or infinity is divided and
    not masked; one of minus infinity stays. Neither waits for more than any other. Rows of temperature 1 that keep
    all cost nothing. Grids do not depend on values: a captured launch follows the tensors.

    Args:
        logits: [M, Q, vocab] float32, last dimension contiguous.
        slots: [M] int64, each row's place in the columns that follow, [S].
        temperature: float32; where it is 0 the row is greedy and is left alone.
        min_p: float32; 0 keeps all. top_k: int64; below 1 keeps all. top_p: float32; 1 keeps all.

    Raises: ValueError, before any launch.
    Twin: division and reference.restrict: the same rows, but for values whose mass above them is within rounding of
        top_p, and for the last bit of min-p's logarithm.
    """
    num_rows, num_positions, vocab_size = logits.shape
    columns = (temperature, min_p, top_k, top_p)
    if slots.shape != (num_rows,) or any(x.shape != temperature.shape for x in columns) or temperature.dim() != 1:
        raise ValueError(f"{num_rows} rows need as many slots, not {tuple(slots.shape)}, and columns of one length")
    if slots.dtype != torch.int64 or top_k.dtype != torch.int64:
        raise ValueError("slots and top_k are int64")
    if any(x.dtype != torch.float32 for x in (logits, temperature, min_p, top_p)):
        raise ValueError("logits, temperature, min_p and top_p are float32")
    if any(x.stride(-1) != 1 for x in (logits, slots, *columns)):
        raise ValueError("a last dimension is not contiguous")
    num_all = num_rows * num_positions
    if num_all == 0:
        return
    num_parts = ceil_div(vocab_size, LANES * MEMBERS)
    num_groups = num_parts * LANES
    highest, mass = (torch.empty(num_all, num_groups, dtype=torch.float32, device=logits.device) for _ in range(2))
    groups = torch.empty(num_all, num_groups, dtype=torch.int32, device=logits.device)
    near = torch.empty(num_all, MEMBERS * BLOCK_G, dtype=torch.float32, device=logits.device)
    threshold = torch.empty(num_all, dtype=torch.float32, device=logits.device)
    sizes = (num_positions, vocab_size, logits.stride(0), logits.stride(1))
    tile = {"LANES": LANES, "MEMBERS": MEMBERS}
    wanted = ceil_div(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(logits.device), num_all)
    grid = (num_all, min(wanted, num_parts))
    _survey_kernel[grid](logits, slots, *columns, highest, mass, *sizes, num_parts, **tile)
    _search_kernel[(num_all,)](
        logits,
        slots,
        *columns,
        highest,
        mass,
        groups,
        near,
        threshold,
        *sizes,
        num_parts,
        BLOCK_L=next_power_of_2(num_groups),
        NUM_BOUNDS=NUM_BOUNDS,
        NUM_BOUND_STEPS=NUM_BOUND_STEPS,
        BLOCK_G=BLOCK_G,
        **tile,
        num_warps=8,
    )
    _apply_kernel[grid](logits, slots, *columns, threshold, *sizes, BLOCK_V=LANES * MEMBERS)
