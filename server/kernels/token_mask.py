"""Forbids tokens by packed bits, one for each token of the vocabulary.

Bits are what the host uploads, an eighth of the bytes of a mask of booleans; they are never unpacked in memory.
"""

import torch
from torch import Tensor

from server.kernels.jit import ceil_div, jit, num_multiprocessors, tl

BLOCK_V = 4096
PROGRAMS_PER_MULTIPROCESSOR = 8


@jit(unspecialised=("rows_ptr", "counts_ptr", "bits_ptr", "stride_bits", "stride_row"))
def _mask_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    num_words: int,
    stride_bits: int,
    vocab_size: int,
    stride_row: int,
    stride_position: int,
    HAS_COUNTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Every n-th block of the vocabulary (axis 0) at one position (axis 1) of one row (axis 2)."""
    position = tl.program_id(1)
    if HAS_COUNTS:  # noqa: SIM102  # decided as it is compiled, unlike the next
        if position >= tl.load(counts_ptr + tl.program_id(2)):
            return
    row = tl.load(rows_ptr + tl.program_id(2))
    words_ptr = bits_ptr + tl.program_id(2).to(tl.int64) * stride_bits + position * num_words
    target_ptr = logits_ptr + row * stride_row + position * stride_position
    for start in range(tl.program_id(0) * BLOCK_V, vocab_size, tl.num_programs(0) * BLOCK_V):
        token_id = start + tl.arange(0, BLOCK_V)
        is_token = token_id < vocab_size
        word = tl.load(words_ptr + token_id // 32, mask=is_token, other=0)
        is_forbidden = ((word >> (token_id % 32)) & 1) == 0
        tl.store(target_ptr + token_id, float("-inf"), mask=is_token & is_forbidden)


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor, counts: Tensor | None = None) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place.

    Args:
        logits: [M, Q, vocab] float32, last dimension contiguous.
        rows: [G] int64, which of the M.
        bits: [G, q, words] int32, each row contiguous, for their first q positions, q <= Q; a token is allowed by bit
            `token % 32`, counted from the lowest, of word `token // 32`.
        counts: [G] int32, so many positions of each row are masked, at most q; None for all. Read on the device: a
            captured launch follows it, and costs next to nothing where it is 0.

    Raises: ValueError, before any launch. Twin: token_mask_reference.mask_tokens.
    """
    check(logits, rows, bits, counts)
    num_rows, num_positions, num_words = bits.shape
    vocab_size = logits.shape[2]
    num_blocks = ceil_div(vocab_size, BLOCK_V)
    wanted = ceil_div(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(logits.device), num_positions * num_rows)
    _mask_kernel[min(wanted, num_blocks), num_positions, num_rows](
        logits,
        rows,
        rows if counts is None else counts,
        bits,
        num_words,
        bits.stride(0),
        vocab_size,
        logits.stride(0),
        logits.stride(1),
        HAS_COUNTS=counts is not None,
        BLOCK_V=BLOCK_V,
    )


def check(logits: Tensor, rows: Tensor, bits: Tensor, counts: Tensor | None) -> None:
    """Raises: ValueError for what mask_tokens cannot take."""
    if counts is not None and (counts.dtype != torch.int32 or counts.shape != rows.shape):
        raise ValueError(f"{tuple(counts.shape)} counts of {counts.dtype} do not fit {tuple(rows.shape)} rows")
    if logits.dtype != torch.float32 or rows.dtype != torch.int64 or bits.dtype != torch.int32:
        raise ValueError("logits are float32, rows int64 and bits int32")
    if rows.shape != bits.shape[:1] or bits.shape[1] > logits.shape[1] or 32 * bits.shape[2] < logits.shape[2]:
        raise ValueError(f"{tuple(bits.shape)} words for {tuple(rows.shape)} rows do not fit {tuple(logits.shape)}")
    if logits.stride(-1) != 1 or bits.stride()[1:] != (bits.shape[2], 1):
        raise ValueError("a row of bits, or the last dimension of logits, is not contiguous")
