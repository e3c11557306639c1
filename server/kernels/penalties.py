"""Repetition, frequency and presence penalties on the tokens of a row's own context.

Only tokens of the context change, so the vocabulary is never passed over: a first kernel walks the row's
token ids and counts them in a row of scratch, a second walks them again and takes each count out. Whoever
takes a count first penalises that token, in all positions; all others find 0, and so does the next launch.
Counts kept from step to step would save the first walk, 64 rows of 8,192 ids or 2 MB, and would cost a
histogram that is right through starts, preemption, and drafts that are not accepted. Two walks need no state.
"""

from typing import Any

import torch
from torch import Tensor

from server.kernels.jit import ceil_div, jit, num_multiprocessors, tl

BLOCK_T = 512
PROGRAMS_PER_MULTIPROCESSOR = 8
IN_PROMPT, IN_DRAFTS = 1 << 30, 1 << 29
"""Flags above a count of occurrences in the output."""


@jit()
def _is_neutral(
    slot: tl.tensor,
    num_tokens: tl.tensor,
    repetition_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    presence_ptr: tl.tensor,
) -> Any:
    """Whether a slot leaves logits as they are: by its penalties, or because nobody is in it."""
    is_repeatable = tl.load(repetition_ptr + slot) == 1.0
    is_free = is_repeatable & (tl.load(frequency_ptr + slot) == 0.0) & (tl.load(presence_ptr + slot) == 0.0)
    return is_free | (num_tokens == 0)


@jit(unspecialised=("slots_ptr",))
def _count_kernel(
    counts_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    num_tokens_ptr: tl.tensor,
    num_prompt_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    vocab_size: int,
    stride_slot: int,
    NUM_DRAFTS: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    IN_DRAFTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """Count every n-th block of ids (axis 0) of one row (axis 1)."""
    row = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    num_tokens = tl.load(num_tokens_ptr + slot).to(tl.int32)
    if _is_neutral(slot, num_tokens, repetition_ptr, frequency_ptr, presence_ptr):
        return
    num_prompt = tl.load(num_prompt_ptr + slot).to(tl.int32)
    row_ptr = counts_ptr + row.to(tl.int64) * vocab_size
    for start in range(tl.program_id(0) * BLOCK_T, num_tokens + NUM_DRAFTS, tl.num_programs(0) * BLOCK_T):
        place = start + tl.arange(0, BLOCK_T)
        token_id = tl.load(token_ids_ptr + slot * stride_slot + place, mask=place < num_tokens + NUM_DRAFTS, other=-1)
        is_id = (token_id >= 0) & (token_id < vocab_size)
        is_output = (place >= num_prompt) & (place < num_tokens)
        tl.atomic_add(row_ptr + token_id, 1, mask=is_id & is_output, sem="relaxed")
        flag = tl.where(place < num_prompt, IN_PROMPT, IN_DRAFTS)
        tl.atomic_or(row_ptr + token_id, flag, mask=is_id & ~is_output, sem="relaxed")


@jit(unspecialised=("slots_ptr",))
def _penalise_kernel(
    logits_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    num_tokens_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    vocab_size: int,
    stride_slot: int,
    stride_row: int,
    stride_position: int,
    NUM_DRAFTS: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    IN_DRAFTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """Take the counts of the same blocks of ids, and penalise each token whose count was still there."""
    row = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    num_tokens = tl.load(num_tokens_ptr + slot).to(tl.int32)
    if _is_neutral(slot, num_tokens, repetition_ptr, frequency_ptr, presence_ptr):
        return
    repetition, frequency = tl.load(repetition_ptr + slot), tl.load(frequency_ptr + slot)
    presence = tl.load(presence_ptr + slot)
    text_ptr = token_ids_ptr + slot * stride_slot
    row_ptr = counts_ptr + row.to(tl.int64) * vocab_size
    for start in range(tl.program_id(0) * BLOCK_T, num_tokens + NUM_DRAFTS, tl.num_programs(0) * BLOCK_T):
        place = start + tl.arange(0, BLOCK_T)
        token_id = tl.load(text_ptr + place, mask=place < num_tokens + NUM_DRAFTS, other=-1)
        is_id = (token_id >= 0) & (token_id < vocab_size)
        found = tl.atomic_xchg(row_ptr + token_id, tl.zeros([BLOCK_T], tl.int32), mask=is_id, sem="relaxed")
        found = tl.where(is_id, found, 0)
        in_prompt = (found & IN_PROMPT) > 0
        count = (found & (IN_DRAFTS - 1)).to(tl.float32)
        for position in range(NUM_DRAFTS + 1):
            if position > 0:  # the draft before this position is part of its context
                count += (token_id == tl.load(text_ptr + num_tokens + position - 1)).to(tl.float32)
            is_seen = (found != 0) & (in_prompt | (count > 0))
            pointer = logits_ptr + row.to(tl.int64) * stride_row + position * stride_position + token_id
            logit = tl.load(pointer, mask=is_seen, other=0.0)
            scaled = tl.where(logit > 0, tl.math.div_rn(logit, repetition), logit * repetition)
            penalised = scaled - frequency * count - presence * (count > 0).to(tl.float32)
            tl.store(pointer, penalised, mask=is_seen)


def penalise(
    logits: Tensor,
    token_ids: Tensor,
    slots: Tensor,
    num_tokens: Tensor,
    num_prompt: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    counts: Tensor,
) -> None:
    """Penalise tokens of the context of each of Q positions of M rows, in place.

    The context of a row's position q is its known tokens and the q drafts behind them. Rows without
    penalties, and rows without tokens, as padding has, cost nothing. Neither grid nor bounds depend on lengths:
    a captured launch follows the tensors.

    Args:
        logits: [M, Q, vocab] float32, last dimension contiguous.
        token_ids: [S, width] int32; width holds Q - 1 drafts behind every row's known tokens.
        slots: [M] int64, rows of the columns that follow and of `token_ids`.
        num_tokens, num_prompt: [S] int64, known tokens, and those of them that are the prompt's.
        repetition, frequency, presence: [S] float32; 1, 0 and 0 leave a row alone. A token of prompt or output
            has its logit divided by `repetition`, or multiplied where it is not positive; one of the output loses
            `frequency` for each occurrence, and `presence`.
        counts: [at least M, vocab] int32 scratch, 0 before and after.

    Raises: ValueError, before any launch.
    Source: Keskar et al. 2019, arXiv:1909.05858, section 4.1, and OpenAI's API. Twin: reference.penalise, bit for bit.
    """
    num_rows, num_positions, vocab_size = logits.shape
    columns = (num_tokens, num_prompt, repetition, frequency, presence)
    if slots.shape != (num_rows,) or any(x.shape != token_ids.shape[:1] for x in columns):
        raise ValueError(f"{num_rows} rows need as many slots, and {token_ids.shape[0]} slots a value in each column")
    if any(x.dtype != torch.int64 for x in (slots, num_tokens, num_prompt)) or token_ids.dtype != torch.int32:
        raise ValueError("slots, num_tokens and num_prompt are int64, token_ids is int32")
    if any(x.dtype != torch.float32 for x in (logits, repetition, frequency, presence)):
        raise ValueError("logits and penalties are float32")
    if counts.dtype != torch.int32 or counts.shape[0] < num_rows or counts.shape[1] != vocab_size:
        raise ValueError(f"{tuple(counts.shape)} counts of {counts.dtype} are no scratch for {tuple(logits.shape)}")
    if not counts.is_contiguous() or any(x.stride(-1) != 1 for x in (logits, token_ids, slots, *columns)):
        raise ValueError("a last dimension is not contiguous")
    if num_rows == 0 or num_positions == 0:
        return
    num_blocks = ceil_div(token_ids.shape[1], BLOCK_T)
    wanted = ceil_div(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(logits.device), num_rows)
    grid = (min(wanted, num_blocks), num_rows)
    flags = {"IN_PROMPT": IN_PROMPT, "IN_DRAFTS": IN_DRAFTS, "BLOCK_T": BLOCK_T}
    _count_kernel[grid](
        counts,
        token_ids,
        slots,
        num_tokens,
        num_prompt,
        repetition,
        frequency,
        presence,
        vocab_size,
        token_ids.stride(0),
        NUM_DRAFTS=num_positions - 1,
        **flags,
    )
    _penalise_kernel[grid](
        logits,
        counts,
        token_ids,
        slots,
        num_tokens,
        repetition,
        frequency,
        presence,
        vocab_size,
        token_ids.stride(0),
        logits.stride(0),
        logits.stride(1),
        NUM_DRAFTS=num_positions - 1,
        **flags,
        enable_fp_fusion=False,  # each product is rounded, as the twin's is
    )
