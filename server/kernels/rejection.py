"""Which drafts are kept, and what the next token is drawn from, without a tensor of probabilities.

Softmaxes are kept as the highest logit and the sum of each row, noted part by part; probabilities are taken from the
logits where they are needed. What comes out is a row of log weights for each sequence, for one draw with Gumbel noise.
"""

import enum
from typing import Any

import torch
from torch import Tensor

from server.kernels.jit import ceil_div, jit, next_power_of_2, tl

BLOCK_V = 4096
UNLIKELY = 70.0
"""What a log weight loses where nothing is left of it: more than noise can make good. Only where rounding leaves
nothing at all do these weights decide, and they are the target's own."""


class Method(enum.IntEnum):
    """How drafts are accepted.

    STANDARD: one by one; Leviathan et al. 2023, arXiv:2211.17192, algorithm 1.
    BLOCK: as a whole, never fewer on average; Sun et al. 2024, arXiv:2403.10444, algorithm 2.
    SYNTHETIC: at given rates, for benchmarks; what comes out is not the target's distribution.
    """

    STANDARD = 0
    BLOCK = 1
    SYNTHETIC = 2


@jit()
def _to_draft_ids(token_id: tl.tensor, to_draft_ptr: tl.tensor, vocab_size: int, IS_REDUCED: tl.constexpr) -> tl.tensor:
    """Ids in the drafter's vocabulary; negative where it has none."""
    if IS_REDUCED:
        is_id = (token_id >= 0) & (token_id < vocab_size)
        return tl.load(to_draft_ptr + token_id, mask=is_id, other=-1).to(tl.int32)
    return token_id


@jit()
def _load_probs(
    row_ptr: tl.tensor, token_id: tl.tensor, vocab_size: int, highest: tl.tensor, total: tl.tensor
) -> tl.tensor:
    """Probabilities of ids; 0 of those that are none."""
    logit = tl.load(row_ptr + token_id, mask=(token_id >= 0) & (token_id < vocab_size), other=float("-inf"))
    return tl.exp(logit.to(tl.float32) - highest) / total


@jit()
def _merge_parts(highest_ptr: tl.tensor, total_ptr: tl.tensor, num_parts: int, BLOCK_P: tl.constexpr) -> Any:
    """Highest logit, and sum in its units, of one row."""
    part = tl.arange(0, BLOCK_P)
    highest = tl.load(highest_ptr + part, mask=part < num_parts, other=float("-inf"))
    total = tl.load(total_ptr + part, mask=part < num_parts, other=0.0)
    top = tl.max(highest, 0)
    top = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(total * tl.exp(highest - top), 0)
    return top, tl.where(total == 0, 1.0, total)  # where there is nothing to choose, nothing is likely


@jit(unspecialised=("num_positions",))
def _part_softmax_kernel(
    logits_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    total_ptr: tl.tensor,
    num_positions: int,
    vocab_size: int,
    stride_row: int,
    stride_position: int,
    BLOCK_V: tl.constexpr,
) -> None:
    """Highest logit, and sum in its units, of one part (axis 1) of one position of one row (axis 0)."""
    row, position = tl.program_id(0) // num_positions, tl.program_id(0) % num_positions
    token_id = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    pointer = logits_ptr + row.to(tl.int64) * stride_row + position * stride_position + token_id
    logit = tl.load(pointer, mask=token_id < vocab_size, other=float("-inf")).to(tl.float32)
    highest = tl.max(logit, 0)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(highest_ptr + place, highest)
    tl.store(total_ptr + place, tl.sum(tl.exp(logit - tl.where(highest > float("-inf"), highest, 0.0)), 0))


@jit()
def _accept_kernel(
    target_ptr: tl.tensor,
    target_highest_ptr: tl.tensor,
    target_total_ptr: tl.tensor,
    draft_ptr: tl.tensor,
    draft_highest_ptr: tl.tensor,
    draft_total_ptr: tl.tensor,
    to_draft_ptr: tl.tensor,
    draft_ids_ptr: tl.tensor,
    num_drafts_ptr: tl.tensor,
    uniforms_ptr: tl.tensor,
    rates_ptr: tl.tensor,
    num_accepted_ptr: tl.tensor,
    chance_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    vocab_size: int,
    draft_vocab_size: int,
    num_parts: int,
    num_draft_parts: int,
    stride_target_row: int,
    stride_target_position: int,
    stride_draft_row: int,
    stride_draft_position: int,
    NUM_DRAFTS: tl.constexpr,
    HAS_Q: tl.constexpr,
    IS_REDUCED: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    IS_SYNTHETIC: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Go through the drafts of one row: how many are kept, or, for blocks, the chance of each beginning."""
    row = tl.program_id(0)
    num_drafts = tl.load(num_drafts_ptr + row).to(tl.int32)
    target_ptr += row.to(tl.int64) * stride_target_row
    draft_ptr += row.to(tl.int64) * stride_draft_row
    num_accepted = tl.full([], 0, tl.int32)
    chance, last_rate = tl.full([], 1.0, tl.float32), tl.full([], 1.0, tl.float32)
    for i in range(NUM_DRAFTS):
        draft_id = tl.load(draft_ids_ptr + row * NUM_DRAFTS + i).to(tl.int32)
        place = (row * (NUM_DRAFTS + 1) + i) * num_parts
        highest, total = _merge_parts(target_highest_ptr + place, target_total_ptr + place, num_parts, BLOCK_P)
        p = _load_probs(target_ptr + i * stride_target_position, draft_id, vocab_size, highest, total)
        q = tl.full([], 1.0, tl.float32)
        if HAS_Q:
            place = (row * NUM_DRAFTS + i) * num_draft_parts
            highest, total = _merge_parts(draft_highest_ptr + place, draft_total_ptr + place, num_draft_parts, BLOCK_P)
            index = _to_draft_ids(draft_id, to_draft_ptr, vocab_size, IS_REDUCED)
            q = _load_probs(draft_ptr + i * stride_draft_position, index, draft_vocab_size, highest, total)
        level = tl.load(uniforms_ptr + row * NUM_DRAFTS + i)
        is_accepted = level * q < p
        if IS_BLOCK:
            tl.store(chance_ptr + row * (NUM_DRAFTS + 1) + i, chance)
            if not HAS_Q:
                tl.store(mass_ptr + row * NUM_DRAFTS + i, chance * (1 - p))
            chance = tl.where(chance * p < q, chance * p / tl.where(q > 0, q, 1.0), 1.0) * (p > 0)
        if IS_SYNTHETIC:
            rate = tl.load(rates_ptr + i)
            is_accepted = level * last_rate < rate
            last_rate = rate
        is_next = is_accepted & (i < num_drafts) & (num_accepted == i)
        num_accepted += is_next.to(tl.int32)
    tl.store(chance_ptr + row * (NUM_DRAFTS + 1) + NUM_DRAFTS, chance)
    tl.store(num_accepted_ptr + row, num_accepted.to(tl.int64))


@jit()
def _residual_mass_kernel(
    target_ptr: tl.tensor,
    target_highest_ptr: tl.tensor,
    target_total_ptr: tl.tensor,
    draft_ptr: tl.tensor,
    draft_highest_ptr: tl.tensor,
    draft_total_ptr: tl.tensor,
    to_draft_ptr: tl.tensor,
    chance_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    vocab_size: int,
    draft_vocab_size: int,
    num_draft_parts: int,
    stride_target_row: int,
    stride_target_position: int,
    stride_draft_row: int,
    stride_draft_position: int,
    NUM_DRAFTS: tl.constexpr,
    IS_REDUCED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """What one part (axis 1) adds to the residual's mass behind one draft of one row (axis 0)."""
    row, i = tl.program_id(0) // NUM_DRAFTS, tl.program_id(0) % NUM_DRAFTS
    num_parts = tl.num_programs(1)
    token_id = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    place = (row * (NUM_DRAFTS + 1) + i) * num_parts
    highest, total = _merge_parts(target_highest_ptr + place, target_total_ptr + place, num_parts, BLOCK_P)
    target_ptr += row.to(tl.int64) * stride_target_row + i * stride_target_position
    p = _load_probs(target_ptr, token_id, vocab_size, highest, total)
    place = tl.program_id(0) * num_draft_parts
    highest, total = _merge_parts(draft_highest_ptr + place, draft_total_ptr + place, num_draft_parts, BLOCK_P)
    draft_ptr += row.to(tl.int64) * stride_draft_row + i * stride_draft_position
    index = _to_draft_ids(token_id, to_draft_ptr, vocab_size, IS_REDUCED)
    q = _load_probs(draft_ptr, index, draft_vocab_size, highest, total)
    chance = tl.load(chance_ptr + row * (NUM_DRAFTS + 1) + i)
    mass = tl.sum(tl.maximum(chance * p - q, 0.0), 0)
    tl.store(mass_ptr + tl.program_id(0) * num_parts + tl.program_id(1), mass)


@jit(unspecialised=("num_mass_parts",))
def _weigh_kernel(
    target_ptr: tl.tensor,
    target_highest_ptr: tl.tensor,
    target_total_ptr: tl.tensor,
    draft_ptr: tl.tensor,
    draft_highest_ptr: tl.tensor,
    draft_total_ptr: tl.tensor,
    to_draft_ptr: tl.tensor,
    draft_ids_ptr: tl.tensor,
    num_drafts_ptr: tl.tensor,
    uniforms_ptr: tl.tensor,
    accepted_ptr: tl.tensor,
    num_accepted_ptr: tl.tensor,
    chance_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    vocab_size: int,
    draft_vocab_size: int,
    num_draft_parts: int,
    num_mass_parts: int,
    stride_target_row: int,
    stride_target_position: int,
    stride_draft_row: int,
    stride_draft_position: int,
    NUM_DRAFTS: tl.constexpr,
    UNLIKELY: tl.constexpr,
    HAS_Q: tl.constexpr,
    IS_REDUCED: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    IS_SYNTHETIC: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """The log weights of one part (axis 1) of the next token of one row (axis 0)."""
    row, num_parts = tl.program_id(0), tl.num_programs(1)
    num_drafts = tl.load(num_drafts_ptr + row).to(tl.int32)
    part = tl.arange(0, BLOCK_P)
    num_accepted = tl.load(accepted_ptr + row).to(tl.int32)
    scale = tl.full([], 1.0, tl.float32)
    if IS_BLOCK:
        num_accepted = tl.full([], 0, tl.int32)
        for i in range(1, NUM_DRAFTS + 1):
            chance = tl.load(chance_ptr + row * (NUM_DRAFTS + 1) + i)
            place = (row * NUM_DRAFTS + i) * num_mass_parts + part
            is_mass = (part < num_mass_parts) & (i < NUM_DRAFTS)
            mass = tl.sum(tl.load(mass_ptr + place, mask=is_mass, other=0.0), 0)
            whole = mass + (1 - chance)
            share = tl.where(whole > 0, mass / tl.where(whole > 0, whole, 1.0), 1.0)
            share = tl.where(i < num_drafts, share, chance)
            is_kept = (tl.load(uniforms_ptr + row * NUM_DRAFTS + i - 1) < share) & (i <= num_drafts)
            num_accepted = tl.where(is_kept, i, num_accepted)
        scale = tl.load(chance_ptr + row * (NUM_DRAFTS + 1) + num_accepted)
    tl.store(num_accepted_ptr + row, num_accepted.to(tl.int64), mask=tl.program_id(1) == 0)

    token_id = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    place = (row * (NUM_DRAFTS + 1) + num_accepted) * num_parts
    highest, total = _merge_parts(target_highest_ptr + place, target_total_ptr + place, num_parts, BLOCK_P)
    target_ptr += row.to(tl.int64) * stride_target_row + num_accepted * stride_target_position
    logit = tl.load(target_ptr + token_id, mask=token_id < vocab_size, other=float("-inf")).to(tl.float32)
    weight = logit - highest - tl.log(total)
    if NUM_DRAFTS > 0 and not IS_SYNTHETIC:  # noqa: SIM102  # decided as it is compiled, unlike the next
        if num_accepted < num_drafts:
            p = tl.exp(logit - highest) / total
            if HAS_Q:
                place = (row * NUM_DRAFTS + num_accepted) * num_draft_parts
                highest, total = _merge_parts(
                    draft_highest_ptr + place, draft_total_ptr + place, num_draft_parts, BLOCK_P
                )
                draft_ptr += row.to(tl.int64) * stride_draft_row + num_accepted * stride_draft_position
                index = _to_draft_ids(token_id, to_draft_ptr, vocab_size, IS_REDUCED)
                q = _load_probs(draft_ptr, index, draft_vocab_size, highest, total)
            else:
                q = (token_id == tl.load(draft_ids_ptr + row * NUM_DRAFTS + num_accepted)).to(tl.float32)
            residual = scale * p - q
            is_left = residual > 0
            weight = tl.where(is_left, tl.log(tl.where(is_left, residual, 1.0)), weight - UNLIKELY)
    tl.store(weights_ptr + row.to(tl.int64) * vocab_size + token_id, weight, mask=token_id < vocab_size)


def verify_drafts(
    target_logits: Tensor,
    draft_ids: Tensor,
    num_drafts: Tensor,
    uniforms: Tensor,
    method: int,
    draft_logits: Tensor | None = None,
    to_draft: Tensor | None = None,
    rates: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Verify the drafts of M rows, at most k each; never waits for the device.

    The next token is a draw from the weights: gumbel_argmax at temperature 1. With Method.STANDARD and BLOCK, kept
    drafts and next token are then distributed as if drawn from the target one by one.

    Args:
        target_logits: [M, k + 1, vocab] float32, float16 or bfloat16, processed, last dimension contiguous; the
            distribution at each draft and behind the last.
        draft_ids: [M, k] int64. num_drafts: [M] int64, at most k; what lies beyond is never looked at.
        uniforms: [M, k] float32 in (0, 1).
        method: of Method.
        draft_logits: [M, k, draft vocab], processed, of the distributions that the drafts were drawn from; None
            where the drafter had no choice, as a lookup has none.
        to_draft: [vocab] int32, where the drafter's vocabulary is not the target's: the id there, or -1.
        rates: [k] float32, for Method.SYNTHETIC: the share of rows that keep at least 1, 2, ... drafts;
            non-increasing.

    Returns: [M] int64, drafts kept; [M, vocab] float32, log weights. A row with NaN keeps none behind it, and has NaN
        weights: its draw has a score that tells.
    Raises: ValueError, before any launch.
    Twin: rejection_reference.verify_drafts.
    """
    num_rows, num_positions, vocab_size = target_logits.shape
    k = num_positions - 1
    if draft_ids.shape != (num_rows, k) or uniforms.shape != (num_rows, k) or num_drafts.shape != (num_rows,):
        raise ValueError(f"drafts, uniforms and counts do not fit logits of {tuple(target_logits.shape)}")
    if draft_ids.dtype != torch.int64 or num_drafts.dtype != torch.int64 or uniforms.dtype != torch.float32:
        raise ValueError("draft_ids and num_drafts are int64, uniforms is float32")
    if draft_logits is not None and draft_logits.shape[:2] != (num_rows, k):
        raise ValueError(f"{tuple(draft_logits.shape)} are no logits of {(num_rows, k)} drafts")
    if to_draft is not None and (to_draft.shape != (vocab_size,) or to_draft.dtype != torch.int32):
        raise ValueError(f"to_draft is [{vocab_size}] int32, not {tuple(to_draft.shape)} {to_draft.dtype}")
    if to_draft is None and draft_logits is not None and draft_logits.shape[2] != vocab_size:
        raise ValueError(f"a draft vocabulary of {draft_logits.shape[2]} needs to_draft")
    if method == Method.SYNTHETIC and (rates is None or rates.shape != (k,) or rates.dtype != torch.float32):
        raise ValueError(f"Method.SYNTHETIC needs {k} float32 rates")
    if not all(x.is_contiguous() for x in (draft_ids, num_drafts, uniforms)) or target_logits.stride(-1) != 1:
        raise ValueError("drafts, counts, uniforms or the last dimension of logits are not contiguous")
    if draft_logits is not None and draft_logits.stride(-1) != 1:
        raise ValueError("the last dimension of the drafts' logits is not contiguous")

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=target_logits.device)

    num_accepted, weights = new(num_rows, dtype=torch.int64), new(num_rows, vocab_size)
    if num_rows == 0:
        return num_accepted, weights
    target, target_strides, target_parts = _note_softmax(target_logits)
    draft, draft_strides, draft_parts, draft_vocab_size = (weights, weights, weights), (0, 0), 1, vocab_size
    has_q = False
    if draft_logits is not None and k > 0 and method != Method.SYNTHETIC:
        draft, draft_strides, draft_parts = _note_softmax(draft_logits)
        draft_vocab_size, has_q = draft_logits.shape[2], True
    both = (*target, *draft, weights if to_draft is None else to_draft)
    drafts = (draft_ids, num_drafts, uniforms)
    accepted, chance = new(num_rows, dtype=torch.int64), new(num_rows, k + 1)
    mass_parts = target_parts if has_q else 1
    mass = new(num_rows, max(k, 1), mass_parts)
    strides = (*target_strides, *draft_strides)
    block_p = next_power_of_2(max(target_parts, draft_parts))
    is_reduced = to_draft is not None
    rules = {
        "NUM_DRAFTS": k,
        "HAS_Q": has_q,
        "IS_REDUCED": is_reduced,
        "IS_BLOCK": method == Method.BLOCK,
        "IS_SYNTHETIC": method == Method.SYNTHETIC,
        "BLOCK_P": block_p,
    }
    _accept_kernel[(num_rows,)](
        *both,
        *drafts,
        uniforms if rates is None else rates,
        accepted,
        chance,
        mass,
        vocab_size,
        draft_vocab_size,
        target_parts,
        draft_parts,
        *strides,
        **rules,
    )
    if has_q and method == Method.BLOCK:
        _residual_mass_kernel[(num_rows * k, target_parts)](
            *both,
            chance,
            mass,
            vocab_size,
            draft_vocab_size,
            draft_parts,
            *strides,
            NUM_DRAFTS=k,
            IS_REDUCED=is_reduced,
            BLOCK_P=block_p,
            BLOCK_V=BLOCK_V,
        )
    _weigh_kernel[(num_rows, target_parts)](
        *both,
        *drafts,
        accepted,
        num_accepted,
        chance,
        mass,
        weights,
        vocab_size,
        draft_vocab_size,
        draft_parts,
        mass_parts,
        *strides,
        UNLIKELY=UNLIKELY,
        BLOCK_V=BLOCK_V,
        **rules,
    )
    return num_accepted, weights


def _note_softmax(logits: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int], int]:
    """Launch the first pass over [M, Q, vocab].

    Returns: logits, their parts' highest and their parts' sums; strides; number of parts.
    """
    num_rows, num_positions, vocab_size = logits.shape
    num_parts = ceil_div(vocab_size, BLOCK_V)
    shape = (num_rows, num_positions, num_parts)
    highest, total = (torch.empty(shape, dtype=torch.float32, device=logits.device) for _ in range(2))
    strides = logits.stride(0), logits.stride(1)
    grid = (num_rows * num_positions, num_parts)
    _part_softmax_kernel[grid](logits, highest, total, num_positions, vocab_size, *strides, BLOCK_V=BLOCK_V)
    return (logits, highest, total), strides, num_parts
