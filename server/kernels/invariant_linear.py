"""A linear layer whose rows do not depend on each other: a token's result has the same bits in every batch.

A library picks its kernel, and with it an order of summation, by the number of rows. Here the order is fixed by
the weight alone: the inputs are cut into spans, each span is summed from its first element to its last, and the
spans' sums are added in order. Few tokens do not fill the device, so that spans are summed by programs of their own
and added by a second kernel; many tokens are multiplied in larger tiles that go through the spans one by one.

The product is that of the weight and the tokens, in this order: the tensor cores then see 64 rows or more however few
the tokens are, and one instruction, of varying width, serves all numbers of tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from server.kernels.jit import ceil_div, jit, next_power_of_2, tl

NUM_PROGRAMS = 192
"""What small batches are split for; part of the order of summation, hence the same on every device."""
MIN_SPAN = 512
NARROW_O = 64
"""Rows of the weight in a tile of a small batch."""
BLOCK_MERGE = 1024


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes and what Triton is told about them; none of it changes a bit of the result."""

    block_o: int
    block_t: int
    block_k: int
    num_warps: int
    num_stages: int


def choose_tiling(num_tokens: int, dtype: torch.dtype) -> Tiling:
    """The tiling for a number of tokens; powers of two, `block_k` at most MIN_SPAN."""
    block_t = max(16, next_power_of_2(num_tokens))
    if dtype == torch.float32:  # multiplied outside the tensor cores
        return Tiling(NARROW_O, min(block_t, 64), 32, num_warps=4, num_stages=3)
    if num_tokens <= 32:
        return Tiling(NARROW_O, block_t, 128, num_warps=4, num_stages=4)
    if num_tokens <= 64:
        return Tiling(NARROW_O, block_t, 64, num_warps=4, num_stages=6)
    return Tiling(128, 128, 64, num_warps=8, num_stages=4)


def span_of(num_in: int, num_out: int) -> int:
    """Inputs that are summed in one go: a multiple of MIN_SPAN, or all."""
    wanted = NUM_PROGRAMS // ceil_div(num_out, NARROW_O)
    num_spans = min(1 << (max(1, wanted).bit_length() - 1), ceil_div(num_in, MIN_SPAN))
    return ceil_div(ceil_div(num_in, num_spans), MIN_SPAN) * MIN_SPAN


@jit()
def _sum_span(
    weight_ptr: tl.tensor,
    x_ptr: tl.tensor,
    is_output: tl.tensor,
    is_token: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Products of a tile of the weight and one of tokens over inputs [begin, end): [BLOCK_O, BLOCK_T] float32."""
    total = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for start in range(begin, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if IS_EVEN:
            weight = tl.load(weight_ptr + k[None, :])
            x = tl.load(x_ptr + k[None, :], mask=is_token[:, None], other=0.0)
        else:
            weight = tl.load(weight_ptr + k[None, :], mask=is_output[:, None] & (k < end)[None, :], other=0.0)
            x = tl.load(x_ptr + k[None, :], mask=is_token[:, None] & (k < end)[None, :], other=0.0)
        total = tl.dot(weight, tl.trans(x), total, input_precision=PRECISION)
    return total


@jit(unspecialised=("num_tokens",))
def _linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    num_tokens: int,
    num_in: int,
    num_out: int,
    stride_x: int,
    stride_weight: int,
    span: int,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """A tile of outputs and tokens (axis 0), over one span (axis 1) if the work is split, else over all in order."""
    # Programs that run at once share tiles of both: GROUP tiles of the weight, then the next tile of tokens.
    num_o, num_t = tl.cdiv(num_out, BLOCK_O), tl.cdiv(num_tokens, BLOCK_T)
    first_o = tl.program_id(0) // (GROUP * num_t) * GROUP
    group = tl.minimum(num_o - first_o, GROUP)
    place = tl.program_id(0) % (GROUP * num_t)
    o = (first_o + place % group) * BLOCK_O + tl.arange(0, BLOCK_O)
    t = place // group * BLOCK_T + tl.arange(0, BLOCK_T)
    weight_ptr += o.to(tl.int64)[:, None] * stride_weight
    x_ptr += t.to(tl.int64)[:, None] * stride_x
    is_output, is_token = o < num_out, t < num_tokens
    if IS_SPLIT:
        begin = tl.program_id(1) * span
        total = _sum_span(
            weight_ptr, x_ptr, is_output, is_token, begin, tl.minimum(begin + span, num_in),
            BLOCK_O, BLOCK_T, BLOCK_K, IS_EVEN, PRECISION,
        )  # fmt: skip
        out_ptr = partial_ptr + tl.program_id(1).to(tl.int64) * num_tokens * num_out
    else:
        total = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
        for begin in range(0, num_in, span):
            total += _sum_span(
                weight_ptr, x_ptr, is_output, is_token, begin, tl.minimum(begin + span, num_in),
                BLOCK_O, BLOCK_T, BLOCK_K, IS_EVEN, PRECISION,
            )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias_ptr + o, mask=is_output, other=0.0).to(tl.float32)[:, None]
    pointer = out_ptr + t.to(tl.int64)[None, :] * num_out + o[:, None]
    tl.store(pointer, total.to(out_ptr.dtype.element_ty), mask=is_output[:, None] & is_token[None, :])


@jit(unspecialised=("num_tokens",))
def _add_spans_kernel(
    partial_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: int,
    num_out: int,
    NUM_SPANS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_O: tl.constexpr,
) -> None:
    """Some outputs (axis 1) of one token (axis 0)."""
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    place = tl.program_id(0).to(tl.int64) * num_out + o
    total = tl.zeros([BLOCK_O], tl.float32)
    for _ in range(NUM_SPANS):
        total += tl.load(partial_ptr + place, mask=o < num_out, other=0.0)
        partial_ptr += num_tokens * num_out  # what is split is small
    if HAS_BIAS:
        total += tl.load(bias_ptr + o, mask=o < num_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=o < num_out)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, each row of x by itself, bit for bit.

    Args:
        x: [..., in] float32, bfloat16 or float16, last dimension contiguous. weight: [out, in], of its type, last
            dimension contiguous; may be a slice of a larger one. bias: [out], of its type.

    Returns: [..., out], of x's type. Sums are float32; products of float32 are not rounded to tf32.
    Raises: ValueError, before any launch.
    Source: Thinking Machines, "Defeating nondeterminism in LLM inference", 2025. Twin: torch.nn.functional.linear.
    """
    num_out, num_in = weight.shape
    if x.shape[-1] != num_in or (bias is not None and bias.shape != (num_out,)):
        raise ValueError(f"{tuple(x.shape)} inputs do not fit a weight of {tuple(weight.shape)}")
    if not x.dtype == weight.dtype == (weight if bias is None else bias).dtype or not x.is_floating_point():
        raise ValueError("inputs, weight and bias have one floating point type")
    if any(y.stride(-1) != 1 for y in (x, weight, weight if bias is None else bias)):
        raise ValueError("a last dimension is not contiguous")
    out = x.new_empty(*x.shape[:-1], num_out)
    rows = x.reshape(-1, num_in)
    num_tokens = rows.shape[0]
    if num_tokens == 0:
        return out
    tiling = choose_tiling(num_tokens, x.dtype)
    span = span_of(num_in, num_out)
    num_spans = ceil_div(num_in, span)
    num_tiles = ceil_div(num_out, tiling.block_o) * ceil_div(num_tokens, tiling.block_t)
    is_split = num_spans > 1 and num_tiles * num_spans <= 2 * NUM_PROGRAMS
    partial = rows
    if is_split:
        partial = torch.empty(num_spans, num_tokens, num_out, dtype=torch.float32, device=x.device)
    _linear_kernel[(num_tiles, num_spans if is_split else 1)](
        rows,
        weight,
        bias,
        out,
        partial,
        num_tokens,
        num_in,
        num_out,
        rows.stride(0),
        weight.stride(0),
        span,
        IS_SPLIT=is_split,
        HAS_BIAS=bias is not None,
        IS_EVEN=num_out % tiling.block_o == 0 and num_in % tiling.block_k == 0,
        PRECISION="ieee",
        BLOCK_O=tiling.block_o,
        BLOCK_T=tiling.block_t,
        BLOCK_K=tiling.block_k,
        GROUP=8,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if is_split:
        _add_spans_kernel[(num_tokens, ceil_div(num_out, BLOCK_MERGE))](
            partial,
            bias,
            out,
            num_tokens,
            num_out,
            NUM_SPANS=num_spans,
            HAS_BIAS=bias is not None,
            BLOCK_O=BLOCK_MERGE,
        )
    return out
