"""Prompt lookup on the device: where did the last tokens occur before, and what followed them?

Every place of a text is scored by how many tokens, up to a window, that end there equal the last ones. A
score and its place make one integer, so that the best match is a maximum, first within a program's part of
the text, then over the parts.
"""

import torch
from torch import Tensor

from server.kernels.jit import ceil_div, jit, next_power_of_2, num_multiprocessors, tl

BLOCK_T = 512
PROGRAMS_PER_MULTIPROCESSOR = 4


@jit(unspecialised=("slots_ptr", "num_tokens_ptr", "part_size"))
def _match_kernel(
    token_ids_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    num_tokens_ptr: tl.tensor,
    rule_ptr: tl.tensor,
    best_ptr: tl.tensor,
    part_size: int,
    stride_slot: int,
    BLOCK_T: tl.constexpr,
) -> None:
    """The best match that ends in one part (axis 0) of one text (axis 1): length << 32 | order, or 0."""
    part, row = tl.program_id(0), tl.program_id(1)
    max_window, takes_last = tl.load(rule_ptr + 1), tl.load(rule_ptr + 2) != 0
    text_ptr = token_ids_ptr + tl.load(slots_ptr + row) * stride_slot
    last = (tl.load(num_tokens_ptr + row) - 1).to(tl.int32)
    best = tl.zeros([BLOCK_T], tl.int64)
    for start in range(part * part_size, tl.minimum((part + 1) * part_size, last), BLOCK_T):
        place = start + tl.arange(0, BLOCK_T)
        is_match = place < last
        length = tl.zeros([BLOCK_T], tl.int32)
        back = 0
        # Most blocks of most texts match nothing after a token or two.
        while (back < max_window) & (tl.max(is_match.to(tl.int32), 0) > 0):
            is_match = is_match & (place >= back)
            wanted = tl.load(text_ptr + last - back, mask=last >= back, other=-1)
            found = tl.load(text_ptr + place - back, mask=is_match, other=-2)
            is_match = is_match & (found == wanted)
            length += is_match.to(tl.int32)
            back += 1
        order = tl.where(takes_last, place, 0x7FFFFFFF - place)
        best = tl.maximum(best, tl.where(length > 0, (length.to(tl.int64) << 32) | order, 0))
    tl.store(best_ptr + row * tl.num_programs(0) + part, tl.max(best, 0))


@jit(unspecialised=("slots_ptr", "num_tokens_ptr", "max_drafts_ptr", "num_parts"))
def _copy_kernel(
    token_ids_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    num_tokens_ptr: tl.tensor,
    max_drafts_ptr: tl.tensor,
    rule_ptr: tl.tensor,
    best_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_parts: int,
    stride_slot: int,
    NUM_DRAFTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """What followed the best match of one text."""
    row = tl.program_id(0)
    min_window, takes_last = tl.load(rule_ptr), tl.load(rule_ptr + 2) != 0
    part = tl.arange(0, BLOCK_P)
    best = tl.max(tl.load(best_ptr + row * num_parts + part, mask=part < num_parts, other=0), 0)
    length, order = (best >> 32).to(tl.int32), (best & 0x7FFFFFFF).to(tl.int32)
    place = tl.where(takes_last, order, 0x7FFFFFFF - order)
    num_left = tl.load(num_tokens_ptr + row).to(tl.int32) - 1 - place
    count = tl.minimum(tl.minimum(num_left, tl.load(max_drafts_ptr + row)), NUM_DRAFTS)
    count = tl.where(length >= min_window, tl.maximum(count, 0), 0)
    draft = tl.arange(0, BLOCK_K)
    text_ptr = token_ids_ptr + tl.load(slots_ptr + row) * stride_slot
    token_id = tl.load(text_ptr + place + 1 + draft, mask=draft < count, other=-1)
    tl.store(ids_ptr + row * NUM_DRAFTS + draft, token_id, mask=draft < NUM_DRAFTS)
    tl.store(counts_ptr + row, count)


def ngram_lookup(
    token_ids: Tensor,
    slots: Tensor,
    num_tokens: Tensor,
    max_drafts: Tensor,
    max_num_tokens: int,
    rule: Tensor,
    num_drafts: int,
) -> tuple[Tensor, Tensor]:
    """Draft what followed the longest earlier occurrence of a text's last tokens.

    Args:
        token_ids: [slots, width] int32. slots: [R] int64, rows of it. num_tokens: [R] int64, known tokens of each.
        max_drafts: [R] int32. max_num_tokens: no text is longer; decides how work is cut.
        rule: [3] int32, read on the device, so that captured steps follow it: the shortest and the longest run of last
            tokens to look for, from 1 on, and whether of equally long matches the last is taken, else the first.

    Returns: [R, num_drafts] int32, -1 beyond a text's count; [R] int32, the counts.
    Raises: ValueError, before any launch.
    Twin: proposers.ngram.NgramProposer.
    """
    num_rows = slots.shape[0]
    if not slots.shape == num_tokens.shape == max_drafts.shape == (num_rows,):
        raise ValueError(f"{num_rows} slots need as many num_tokens and max_drafts")
    if token_ids.dtype != torch.int32 or any(x.stride(-1) != 1 for x in (token_ids, slots, num_tokens, max_drafts)):
        raise ValueError("token_ids is int32, and all last dimensions are contiguous")
    if rule.shape != (3,) or rule.dtype != torch.int32:
        raise ValueError(f"the rule is three int32, not {tuple(rule.shape)} {rule.dtype}")
    if num_drafts < 1 or max_num_tokens > token_ids.shape[1]:
        raise ValueError(f"no lookup in {max_num_tokens} tokens, for {num_drafts} drafts")
    ids = torch.empty(num_rows, num_drafts, dtype=torch.int32, device=token_ids.device)
    counts = torch.empty(num_rows, dtype=torch.int32, device=token_ids.device)
    if num_rows == 0:
        return ids, counts
    num_blocks = max(1, ceil_div(max_num_tokens, BLOCK_T))
    wanted = ceil_div(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(token_ids.device), num_rows)
    part_size = ceil_div(num_blocks, min(wanted, num_blocks)) * BLOCK_T
    num_parts = max(1, ceil_div(max_num_tokens, part_size))
    best = torch.empty(num_rows, num_parts, dtype=torch.int64, device=token_ids.device)
    _match_kernel[(num_parts, num_rows)](
        token_ids,
        slots,
        num_tokens,
        rule,
        best,
        part_size,
        token_ids.stride(0),
        BLOCK_T=BLOCK_T,
    )
    _copy_kernel[(num_rows,)](
        token_ids,
        slots,
        num_tokens,
        max_drafts,
        rule,
        best,
        ids,
        counts,
        num_parts,
        token_ids.stride(0),
        NUM_DRAFTS=num_drafts,
        BLOCK_K=next_power_of_2(num_drafts),
        BLOCK_P=next_power_of_2(ceil_div(token_ids.shape[1], BLOCK_T)),  # one code for all bounds
    )
    return ids, counts
