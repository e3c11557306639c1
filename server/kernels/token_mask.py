"""Forbids tokens by packed bits, one for each token of the vocabulary.

Bits are what the host uploads, an eighth of the bytes of a mask of booleans; they are never unpacked in memory.
"""

import torch
from torch import Tensor

from server.kernels.jit import ceil_div, jit, tl

BLOCK_V = 4096


@jit(unspecialised=("rows_ptr", "bits_ptr", "stride_row"))
def _mask_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    num_words: int,
    vocab_size: int,
    stride_row: int,
    stride_position: int,
    BLOCK_V: tl.constexpr,
) -> None:
    """A block of the vocabulary (axis 0) at one position (axis 1) of one row (axis 2)."""
    position = tl.program_id(1)
    row = tl.load(rows_ptr + tl.program_id(2))
    words_ptr = bits_ptr + (tl.program_id(2) * tl.num_programs(1) + position) * num_words
    token_id = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_token = token_id < vocab_size
    word = tl.load(words_ptr + token_id // 32, mask=is_token, other=0)
    is_forbidden = ((word >> (token_id % 32)) & 1) == 0
    target = logits_ptr + row * stride_row + position * stride_position + token_id
    tl.store(target, float("-inf"), mask=is_token & is_forbidden)


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place.

    Args:
        logits: [M, Q, vocab] float32, last dimension contiguous.
        rows: [G] int64, which of the M.
        bits: [G, q, words] int32, contiguous, for their first q positions, q <= Q; a token is allowed by bit
            `token % 32`, counted from the lowest, of word `token // 32`.

    Raises: ValueError, before any launch. Twin: token_mask_reference.mask_tokens.
    """
    check(logits, rows, bits)
    num_rows, num_positions, num_words = bits.shape
    vocab_size = logits.shape[2]
    _mask_kernel[ceil_div(vocab_size, BLOCK_V), num_positions, num_rows](
        logits, rows, bits, num_words, vocab_size, logits.stride(0), logits.stride(1), BLOCK_V=BLOCK_V
    )


def check(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Raises: ValueError for what mask_tokens cannot take."""
    if logits.dtype != torch.float32 or rows.dtype != torch.int64 or bits.dtype != torch.int32:
        raise ValueError("logits are float32, rows int64 and bits int32")
    if rows.shape != bits.shape[:1] or bits.shape[1] > logits.shape[1] or 32 * bits.shape[2] < logits.shape[2]:
        raise ValueError(f"{tuple(bits.shape)} words for {tuple(rows.shape)} rows do not fit {tuple(logits.shape)}")
    if logits.stride(-1) != 1 or not bits.is_contiguous():
        raise ValueError("bits, or the last dimension of logits, are not contiguous")
