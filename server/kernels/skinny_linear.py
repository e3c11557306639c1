"""Linear layers of few tokens, whose time is that of reading the weight.

Libraries multiply few rows by kernels made for many: between them and the memory's speed lie a second kernel that adds
up parts of a sum, and places where too few programs wait for memory at once. Here the product is that of the weight
and the tokens, in this order, so that a tile has few columns: 8 tokens are no smaller a product than the tensor cores
do. A weight is cut so that its tiles fill the device in one go:

- Up to 8 tokens: tiles of 16 rows, whose inputs the warps of a program share out among themselves.
- More tokens: tiles of 64 rows, whose inputs are shared out among programs. Whoever is last adds up, in order.
- A weight of many rows fills the device as it is, in tiles of 128.

The last is for layers that gate, of twice as many rows: gate and up alternate in a tile, and what is written is
`silu(gate) * up`. Where a library is as fast, it is called.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from server.kernels.jit import ceil_div, jit, next_power_of_2, num_multiprocessors, tl

MAX_TOKENS = 64
"""Beyond, products are bound by arithmetic as much as by memory."""
FULL = 0.8
"""Part of the device that must have a program where another cut, or a library, is as good."""
SPLIT_O = 64
"""Rows of a tile whose inputs are shared out among programs; as many inputs are multiplied at a time."""
WIDE_O = 128
BLOCK_GATE = 1024


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut, and what Triton is told about it.

    Attributes:
        block_o, block_t: rows of the weight, and tokens, of a tile. block_k: inputs that are multiplied at a time.
        num_groups: of warps that share out a tile's inputs. num_splits: programs that do.
    """

    block_o: int
    block_t: int
    block_k: int
    num_groups: int
    num_splits: int
    num_warps: int
    num_stages: int


@functools.cache
def choose_tiling(num_tokens: int, num_in: int, num_rows: int, num_programs: int, *, is_gated: bool) -> Tiling | None:
    """How to multiply; None where a library is to. Measured on an H200, see docs/performance.md.

    Args: num_rows: of the weight. num_programs: that run at once.
    """
    if num_tokens > MAX_TOKENS:
        return None
    block_t = max(8, next_power_of_2(num_tokens))
    if num_rows >= FULL * num_programs * WIDE_O:
        if not is_gated:
            return None
        num_warps, num_stages = (4, 3) if block_t <= 16 else (8, 4)
        return Tiling(WIDE_O, max(16, block_t), 128, 1, 1, num_warps, num_stages)
    if block_t == 8:
        return Tiling(16, 8, 128, 4, 1, num_warps=4, num_stages=3)
    num_splits = _num_splits(num_in, num_rows, num_programs)
    # Of 33 tokens and more, a library multiplies all but the longest sums as fast.
    if num_splits and not is_gated and (block_t <= 32 or num_in >= 2 * num_rows):
        return Tiling(SPLIT_O, block_t, SPLIT_O, 1, num_splits, num_warps=4, num_stages=8)
    if block_t == 16:
        return Tiling(16, 16, 128, 2, 1, num_warps=2, num_stages=4)
    return None


def _num_splits(num_in: int, num_rows: int, num_programs: int) -> int:
    """Programs to a tile, all of which run at once; 0 if they leave too much of the device idle."""
    num_tiles = ceil_div(num_rows, SPLIT_O)
    if num_tiles > num_programs:
        return 0
    num_splits = 1 << ((num_programs // num_tiles).bit_length() - 1)
    is_even = num_in % (num_splits * SPLIT_O) == 0
    return num_splits if is_even and num_tiles * num_splits >= FULL * num_programs else 0


@jit(unspecialised=("num_tokens",), is_slow_to_compile=True)
def _skinny_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    count_ptr: tl.tensor,
    num_tokens: int,
    num_in: int,
    num_out: int,
    span: int,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """A tile of the weight (axis 0) with all tokens, over one span of the inputs (axis 1)."""
    tile, split = tl.program_id(0), tl.program_id(1)
    r, t, k = tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    is_token = t < num_tokens
    begin = split * span
    if IS_GATED:
        o = tile * (BLOCK_O // 2) + r // 2
        row = o + r % 2 * num_out
    else:
        o = tile * BLOCK_O + r
        row = o
    is_output = o < num_out
    weight_ptr += row.to(tl.int64) * num_in + begin
    x_ptr += t * num_in + begin
    if HAS_RESIDUAL:  # early, as nothing would be left to wait for meanwhile at the end
        is_place = is_output[:, None] & is_token[None, :]
        residual = tl.load(residual_ptr + t[None, :] * num_out + o[:, None], mask=is_place, other=0.0)
    if NUM_GROUPS > 1:  # a product for each group, which its warps take as a whole
        group = tl.arange(0, NUM_GROUPS)[:, None, None]
        place = group * BLOCK_K + k[None, None, :]
        parts = tl.zeros([NUM_GROUPS, BLOCK_O, BLOCK_T], tl.float32)
        for start in range(0, span, NUM_GROUPS * BLOCK_K):
            i = start + place
            if IS_EVEN:
                weight = tl.load(weight_ptr[None, :, None] + i)
                x = tl.load(x_ptr[None, :, None] + i, mask=is_token[None, :, None], other=0.0)
            else:
                weight = tl.load(weight_ptr[None, :, None] + i, mask=is_output[None, :, None] & (i < num_in), other=0.0)
                x = tl.load(x_ptr[None, :, None] + i, mask=is_token[None, :, None] & (i < num_in), other=0.0)
            parts = tl.dot(weight, tl.permute(x, (0, 2, 1)), parts)
        total = tl.sum(parts, 0)
    else:
        total = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
        for start in range(0, span, BLOCK_K):
            i = start + k[None, :]
            if IS_EVEN:
                weight = tl.load(weight_ptr[:, None] + i)
                x = tl.load(x_ptr[:, None] + i, mask=is_token[:, None], other=0.0)
            else:
                weight = tl.load(weight_ptr[:, None] + i, mask=is_output[:, None] & (i < num_in), other=0.0)
                x = tl.load(x_ptr[:, None] + i, mask=is_token[:, None] & (i < num_in), other=0.0)
            total = tl.dot(weight, tl.trans(x), total)
    is_last = True
    if NUM_SPLITS > 1:
        place = r[:, None] * BLOCK_T + t[None, :]
        partial_ptr += tile * (NUM_SPLITS * BLOCK_O * BLOCK_T)
        tl.store(partial_ptr + split * (BLOCK_O * BLOCK_T) + place, total)
        tl.debug_barrier()  # all of it is written before one thread says so
        is_last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu") == NUM_SPLITS - 1
        if is_last:
            total = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
            for _ in tl.static_range(NUM_SPLITS):
                total += tl.load(partial_ptr + place, cache_modifier=".cg")
                partial_ptr += BLOCK_O * BLOCK_T
            tl.store(count_ptr + tile, 0)  # as the next launch expects it
    if is_last:
        token_ptr = out_ptr + t[None, :] * num_out
        if IS_GATED:
            gate, up = tl.split(tl.permute(tl.reshape(total, [BLOCK_O // 2, 2, BLOCK_T]), (0, 2, 1)))
            value = (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty)
            gated = tile * (BLOCK_O // 2) + tl.arange(0, BLOCK_O // 2)
            tl.store(token_ptr + gated[:, None], value, mask=(gated < num_out)[:, None] & is_token[None, :])
        else:
            if HAS_BIAS:
                total += tl.load(bias_ptr + o, mask=is_output, other=0.0).to(tl.float32)[:, None]
            if HAS_RESIDUAL:
                total += residual.to(tl.float32)
            value = total.to(out_ptr.dtype.element_ty)
            tl.store(token_ptr + o[:, None], value, mask=is_output[:, None] & is_token[None, :])


@jit()
def _gate_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_out: int,
    BLOCK: tl.constexpr,
) -> None:
    """Some outputs (axis 1) of one token (axis 0)."""
    token = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = o < num_out
    gate = tl.load(gate_up_ptr + token * 2 * num_out + o, mask=is_output, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (token * 2 + 1) * num_out + o, mask=is_output, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + token * num_out + o, value.to(out_ptr.dtype.element_ty), mask=is_output)


def can_multiply(weight: Tensor) -> bool:
    """Whether a weight is of a type and on a device that the tilings were measured for: half precision, Hopper."""
    if weight.device.type != "cuda" or weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(weight.device)[0] == 9


def tile_counts(weight: Tensor) -> Tensor:
    """What `skinny_linear` needs beside a weight for as long as it lives: one tensor for each weight."""
    return torch.zeros(ceil_div(weight.shape[0], SPLIT_O), dtype=torch.int32, device=weight.device)


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, residual: Tensor | None = None
) -> Tensor:
    """x @ weight.T + bias + residual, by a library where there are many tokens.

    Args:
        x: [..., in] bfloat16 or float16. weight: [out, in], contiguous, and bias: [out], of its type.
        counts: see tile_counts; all zero before and after, and in between not to be used on two streams.
        residual: [..., out], of x's type.

    Returns: [..., out], of x's type. Sums are float32. Equal numbers of tokens give equal bits.
    Source: the idea of split sums whose last program adds up is Osama et al., "Stream-K", 2023, arXiv:2301.03598;
        tiles and warps are our own measurements. Twin: torch.nn.functional.linear.
    """
    out: Tensor = torch.ops.outrider.skinny_linear.default(x, weight, bias, counts, residual)
    return out


def skinny_gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T), by a library and a second kernel where there are many tokens.

    Args: x: [..., in] bfloat16 or float16. weight: [2 * out, in], contiguous, of its type; gate, then up.
    Returns: [..., out], of x's type. Gate and up are float32, or rounded to x's type where a library multiplies.
    Source and twin: as of skinny_linear, silu(gate) * up behind it.
    """
    out: Tensor = torch.ops.outrider.skinny_gated_linear.default(x, weight)
    return out


_DEVICES = ("cuda", "cpu")
"""On the CPU the interpreter runs the kernels."""
# Not torch.library.custom_op, which costs another 14 microseconds a call in steps that are not replayed.
torch.library.define(
    "outrider::skinny_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor counts, Tensor? residual=None) -> Tensor",
)
torch.library.define("outrider::skinny_gated_linear", "(Tensor x, Tensor weight) -> Tensor")


@torch.library.impl("outrider::skinny_linear", _DEVICES)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, residual: Tensor | None = None) -> Tensor:
    num_rows, num_in = weight.shape
    tokens = x.reshape(-1, num_in).contiguous()
    tiling = _tiling(tokens, weight, is_gated=False)
    if tiling is None:
        product = functional.linear(x, weight, bias)
        return product if residual is None else product.add_(residual)
    out = x.new_empty(*x.shape[:-1], num_rows)
    _launch(tiling, tokens, weight, bias, counts, out, residual)
    return out


@torch.library.impl("outrider::skinny_gated_linear", _DEVICES)
def _gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    num_rows, num_in = weight.shape
    num_out = num_rows // 2
    out = x.new_empty(*x.shape[:-1], num_out)
    tokens = x.reshape(-1, num_in).contiguous()
    tiling = _tiling(tokens, weight, is_gated=True)
    if tiling is not None:
        _launch(tiling, tokens, weight, None, None, out)
    elif tokens.shape[0]:
        gate_up = functional.linear(tokens, weight)
        _gate_kernel[(tokens.shape[0], ceil_div(num_out, BLOCK_GATE))](gate_up, out, num_out, BLOCK=BLOCK_GATE)
    return out


def _tiling(tokens: Tensor, weight: Tensor, *, is_gated: bool) -> Tiling | None:
    num_tokens, num_in = tokens.shape
    if num_tokens == 0:
        return None
    return choose_tiling(num_tokens, num_in, weight.shape[0], num_multiprocessors(weight.device), is_gated=is_gated)


def _launch(
    tiling: Tiling,
    tokens: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counts: Tensor | None,
    out: Tensor,
    residual: Tensor | None = None,
) -> None:
    """Args: counts: None for a layer that gates, which is not split."""
    num_rows, num_in = weight.shape
    num_tiles = ceil_div(num_rows, tiling.block_o)
    partial = None
    if tiling.num_splits > 1:
        num_partial = num_tiles * tiling.num_splits * tiling.block_o * tiling.block_t
        partial = torch.empty(num_partial, dtype=torch.float32, device=tokens.device)
    span = num_in // tiling.num_splits
    _skinny_kernel[(num_tiles, tiling.num_splits)](
        tokens,
        weight,
        bias,
        None if residual is None else residual.contiguous(),
        out,
        partial,
        counts,
        tokens.shape[0],
        num_in,
        out.shape[-1],
        span,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        IS_GATED=counts is None,
        IS_EVEN=num_rows % tiling.block_o == 0 and span % (tiling.num_groups * tiling.block_k) == 0,
        NUM_GROUPS=tiling.num_groups,
        NUM_SPLITS=tiling.num_splits,
        BLOCK_O=tiling.block_o,
        BLOCK_T=tiling.block_t,
        BLOCK_K=tiling.block_k,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def _linear_shape(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, residual: Tensor | None = None
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _gated_linear_shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


torch.library.register_fake("outrider::skinny_linear", _linear_shape)
torch.library.register_fake("outrider::skinny_gated_linear", _gated_linear_shape)
