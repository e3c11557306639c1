"""Sampling as one pass over the logits: temperature, Gumbel noise and argmax.

The noise is that of kernels/noise.py, word for word: argmax(logits / temperature + noise) is a draw from
the softmax, fixed by key, position and stream. The vocabulary is cut into parts, so that one row fills
the device; a second kernel picks the best part.
"""

import torch
from torch import Tensor

from server.kernels.jit import ceil_div, jit, next_power_of_2, num_multiprocessors, tl
from server.kernels.noise_kernel import mix_32, state, stream_word, to_unit

BLOCK_V = 1024
PROGRAMS_PER_MULTIPROCESSOR = 8


@jit()
def _gumbel(low: tl.tensor, high: tl.tensor, token_id: tl.tensor) -> tl.tensor:
    """The noise of uint32 token ids under the two words of a key and position."""
    unit = to_unit(mix_32(mix_32((token_id * 0x9E3779B9) ^ low) ^ high))
    # There is no log1p here. log(w) / (w - 1) with the rounded w = 1 - unit is as exact as one (Goldberg 1991,
    # theorem 4): the error of w is in both factors.
    rest = 1.0 - unit
    exponential = tl.where(rest == 1.0, unit, unit * tl.log(rest) / tl.where(rest == 1.0, 1.0, rest - 1.0))
    return -tl.log(exponential)


@jit(unspecialised=("key_ptr", "position_ptr", "temperature_ptr", "noise_ids_ptr", "num_positions", "part_size"))
def _part_kernel(
    logits_ptr: tl.tensor,
    key_ptr: tl.tensor,
    position_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    noise_ids_ptr: tl.tensor,
    best_score_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    num_positions: int,
    vocab_size: int,
    part_size: int,
    stride_row: int,
    stride_position: int,
    STREAM: tl.constexpr,
    HAS_NOISE_IDS: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """The best token of one position of one row (axis 0) in one part (axis 1) of the vocabulary."""
    part = tl.program_id(1)
    row, offset = tl.program_id(0) // num_positions, tl.program_id(0) % num_positions
    temperature = tl.load(temperature_ptr + row)
    low, high = state(tl.load(key_ptr + row), tl.load(position_ptr + row) + offset, STREAM)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_row + offset * stride_position

    end = tl.minimum((part + 1) * part_size, vocab_size)
    best_score = tl.full([BLOCK_V], float("-inf"), tl.float32)
    best_id = part * part_size + tl.arange(0, BLOCK_V)
    for start in range(part * part_size, end, BLOCK_V):
        token_id = start + tl.arange(0, BLOCK_V)
        score = tl.load(row_ptr + token_id, mask=token_id < end, other=float("-inf")).to(tl.float32)
        if temperature > 0:
            noise_id = token_id
            if HAS_NOISE_IDS:
                noise_id = tl.load(noise_ids_ptr + token_id, mask=token_id < end, other=0)
            score = tl.math.div_rn(score, temperature) + _gumbel(low, high, noise_id.to(tl.uint32))
        score = tl.where(score == score, score, float("inf"))
        is_better = score > best_score  # the lower id wins a tie, and where all is minus infinity
        best_score = tl.where(is_better, score, best_score)
        best_id = tl.where(is_better, token_id, best_id)
    top = tl.max(best_score, 0)
    place = tl.program_id(0) * tl.num_programs(1) + part
    tl.store(best_score_ptr + place, top)
    tl.store(best_id_ptr + place, tl.min(tl.where(best_score == top, best_id, vocab_size - 1), 0))


@jit(unspecialised=("num_parts",))
def _pick_kernel(
    best_score_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    num_parts: int,
    BLOCK_P: tl.constexpr,
) -> None:
    """The best part of one row; parts are in the order of their ids, so the lower id wins again."""
    part = tl.arange(0, BLOCK_P)
    place = tl.program_id(0) * num_parts + part
    is_part = part < num_parts
    score = tl.load(best_score_ptr + place, mask=is_part, other=float("-inf"))
    token_id = tl.load(best_id_ptr + place, mask=is_part, other=0x7FFFFFFF)
    top = tl.max(score, 0)
    winner = tl.min(tl.where(is_part & (score == top), token_id, 0x7FFFFFFF), 0)
    tl.store(ids_ptr + tl.program_id(0), winner.to(tl.int64))
    tl.store(scores_ptr + tl.program_id(0), top)


def gumbel_argmax(
    logits: Tensor,
    key: Tensor,
    position: Tensor,
    temperature: Tensor,
    stream: int,
    noise_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose a token in each of Q positions of M rows: argmax(logits / temperature + noise).

    Of equal scores the lowest id wins, as in the twin. NaN counts as infinity: a row with NaN still gets
    an id of the vocabulary, and a score that tells.

    Args:
        logits: [M, Q, vocab] float32, float16 or bfloat16, last dimension contiguous; not changed.
        key: [M] int64. position: [M] int64, of the row's first token to be chosen; the others follow it.
        temperature: [M] float32; where it is 0 the likeliest token is chosen, without noise.
        stream: of kernels.noise.Stream.
        noise_ids: [vocab] int64, the id whose noise each token has; its own where None.

    Returns: the ids, [M, Q] int64, and their scores, [M, Q] float32: finite unless the logits have NaN or infinity,
        or leave nothing to choose.

    Raises: ValueError, before any launch.
    Twin: noise.gumbel and argmax in worker/sampler.py; scores equal but for the last bits of a logarithm.
    """
    num_rows, num_positions, vocab_size = logits.shape
    if not key.shape == position.shape == temperature.shape == (num_rows,):
        shapes = [tuple(x.shape) for x in (key, position, temperature)]
        raise ValueError(f"{num_rows} rows need as many keys, positions and temperatures, not {shapes}")
    if key.dtype != torch.int64 or position.dtype != torch.int64 or temperature.dtype != torch.float32:
        raise ValueError("key and position are int64, temperature is float32")
    if noise_ids is not None and (noise_ids.shape != (vocab_size,) or noise_ids.dtype != torch.int64):
        raise ValueError(f"noise_ids are an int64 for each of {vocab_size} tokens")
    if any(x.stride(-1) != 1 for x in (logits, key, position, temperature)):
        raise ValueError("a last dimension is not contiguous")
    num_all = num_rows * num_positions
    ids = torch.empty(num_rows, num_positions, dtype=torch.int64, device=logits.device)
    scores = torch.empty(num_rows, num_positions, dtype=torch.float32, device=logits.device)
    if num_all == 0:
        return ids, scores
    num_blocks = ceil_div(vocab_size, BLOCK_V)
    wanted = ceil_div(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(logits.device), num_all)
    part_size = ceil_div(num_blocks, min(wanted, num_blocks)) * BLOCK_V
    num_parts = ceil_div(vocab_size, part_size)
    best_score = torch.empty(num_all, num_parts, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(num_all, num_parts, dtype=torch.int32, device=logits.device)
    _part_kernel[(num_all, num_parts)](
        logits,
        key,
        position,
        temperature,
        key if noise_ids is None else noise_ids,
        best_score,
        best_id,
        num_positions,
        vocab_size,
        part_size,
        logits.stride(0),
        logits.stride(1),
        STREAM=stream_word(stream),
        HAS_NOISE_IDS=noise_ids is not None,
        BLOCK_V=BLOCK_V,
    )
    _pick_kernel[(num_all,)](best_score, best_id, ids, scores, num_parts, BLOCK_P=next_power_of_2(num_blocks))
    return ids, scores
