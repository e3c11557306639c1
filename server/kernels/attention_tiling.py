"""How a launch of paged attention is cut, from what the host knows: shapes, types and the device."""

from dataclasses import dataclass

import torch

from server.kernels.jit import ceil_div, next_power_of_2, num_multiprocessors

MAX_SPLITS = 64
SHORT_QUERY = 16
"""Longest query that is a decoding or a verification, whose time is that of reading KV."""
SHORT_PROGRAMS, LONG_PROGRAMS = 8, 1
"""For each multiprocessor, how many programs short and long queries are split for: reading wants many loads in
flight, multiplying no more than one program everywhere."""


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


def choose_num_splits(
    num_programs: int, max_num_query: int, context_bound: int, block_n: int, device: torch.device
) -> int:
    """Over how many programs each row's positions are split: a power of two.

    Args: num_programs: without splitting. context_bound: no row sees more positions.
    """
    per_multiprocessor = SHORT_PROGRAMS if max_num_query <= SHORT_QUERY else LONG_PROGRAMS
    wanted = per_multiprocessor * num_multiprocessors(device) // max(1, num_programs)
    most = min(MAX_SPLITS, ceil_div(context_bound, block_n))
    return 1 << (max(1, min(wanted, most)).bit_length() - 1)
