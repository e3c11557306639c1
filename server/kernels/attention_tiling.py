"""How a launch of paged attention is cut, from what the host knows: shapes, types and the device."""

from dataclasses import dataclass

import torch

from server.kernels.jit import ceil_div, next_power_of_2, num_multiprocessors

MAX_SPLITS = 64
SHORT_QUERY = 16
"""Longest query that is a decoding or a verification, whose time is that of reading KV."""
LONGEST_SPLIT = 1024
"""Positions of a short query that one program goes through at most, where the launch has programs for that: a long
row among short ones is done before long."""
MAX_WAVES = 8
"""Programs of a launch for short queries at most, by multiprocessors, counting those that find nothing to do."""


@dataclass(frozen=True, slots=True)
class Splits:
    """Over how many programs positions are split: every row over the fewest, if it has tiles for them, a longer one
    over the most, a power of two."""

    fewest: int
    most: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a launch is cut: tile sizes, powers of two from 16, and what Triton is told about them."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tiling(num_rows: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """The tiling for a matrix of `num_rows` query rows (tokens times heads per KV head).

    A stage of Triton's pipeline goes to the block table and one to the keys and values that it points at, so
    that five are needed to load one tile ahead of the one in use. float32 goes through the tensor cores as three
    products of tf32, whose parts fill the registers: its tiles are small.
    """
    rows = max(16, next_power_of_2(num_rows))
    if dtype == torch.float32:
        return Tiling(min(rows, 32), 32, num_warps=4, num_stages=2)
    if head_dim > 128:
        return Tiling(min(rows, 128), 32, num_warps=4 if rows < 64 else 8, num_stages=5)
    return Tiling(min(rows, 128), 64, num_warps=4 if rows < 128 else 8, num_stages=5)


def fixed_tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """One tiling for all numbers of query rows, and with it one order of summation.

    64 rows are what the instruction for many rows takes; for fewer the compiler picks another one, which sums
    differently.
    """
    if dtype == torch.float32:
        return Tiling(32, 32, num_warps=4, num_stages=2)
    return Tiling(64, 32 if head_dim > 128 else 64, num_warps=4, num_stages=5)


def choose_splits(
    num_programs: int, num_row_programs: int, max_num_query: int, context_bound: int, block_n: int, device: torch.device
) -> Splits:
    """One program for each multiprocessor is the aim: more of them wait for the same memory, and start one by one.

    Args: num_programs, num_row_programs: without splitting, of all rows and of one. context_bound: no row sees more
        positions.
    """
    wave = num_multiprocessors(device)
    limit = min(MAX_SPLITS, ceil_div(context_bound, block_n))
    fewest = max(1, min(wave // num_programs, limit))
    if max_num_query > SHORT_QUERY:
        fewest = 1 << (fewest.bit_length() - 1)
        return Splits(fewest, fewest)
    most = min(
        limit, ceil_div(context_bound, LONGEST_SPLIT), wave // num_row_programs, MAX_WAVES * wave // num_programs
    )
    return Splits(fewest, next_power_of_2(max(fewest, most)))


def fills_device(num_rows: int, num_kv_heads: int, device: torch.device) -> bool:
    """Whether only long rows are split: `choose_splits` gives 1 as the fewest."""
    return 2 * num_rows * num_kv_heads > num_multiprocessors(device)
