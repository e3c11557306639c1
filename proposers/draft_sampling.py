"""Draws one draft for each of several sequences, so that what verifies them can make up for how they were drawn."""

import torch
from torch import Tensor

from proposers.base import DraftSampling
from server.kernels import cpu_sampling, jit
from server.kernels.gumbel_argmax import gumbel_argmax
from server.kernels.noise import Stream, gumbel, in_stream, uniform
from server.kernels.rejection_reference import draw as draw_by_coin
from server.model.sampling_operators import has_sampling_operators

_COINS_PER_POSITION = 64
"""More than a step can have drafts: a coin belongs to the step's first new position, so no two steps share one."""


def draw(
    logits: Tensor, sampling: DraftSampling, num_tokens: Tensor, index: int, to_target: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token for each of R sequences.

    Greedy sequences get the likeliest one. Those with a seed get the token that the target's own noise at its
    position picks from the draft's distribution (Daliri et al. 2024, arXiv:2408.07978): where the two distributions
    agree, so do the tokens. The others draw by a coin of their own, which nothing else depends on.

    Args:
        logits: [R, vocab] float32. num_tokens: [R] int64. index: of the draft among the step's.
        to_target: [vocab] int64, the target's id of each token; None where they are the same.
    Returns: [R] int64 in the draft's vocabulary, and [R, vocab] logits whose softmax they were drawn from.
    """
    temperature = sampling.temperature
    is_greedy = temperature == 0
    scaled = logits / torch.where(is_greedy, 1.0, temperature)[:, None]
    if jit.is_available(logits.device):
        return _draw_by_kernel(scaled, sampling, num_tokens, index, to_target), scaled
    ids = scaled.argmax(-1)
    if sampling.has_unseeded:
        ids = torch.where(is_greedy | sampling.is_seeded, ids, _by_coin(scaled, sampling.key, num_tokens, index))
    if sampling.has_seeded:
        noise = _target_noise(sampling.key, num_tokens + index, to_target, scaled.shape[1])
        ids = torch.where(sampling.is_seeded & ~is_greedy, (scaled + noise).argmax(-1), ids)
    return ids, scaled


def _draw_by_kernel(
    scaled: Tensor, sampling: DraftSampling, num_tokens: Tensor, index: int, to_target: Tensor | None
) -> Tensor:
    """The same by Gumbel noise for all, in one pass; a noise of 0 makes a row greedy."""
    noisy = (sampling.temperature > 0).float()
    coins = num_tokens * _COINS_PER_POSITION + index
    key = torch.where(sampling.is_seeded, sampling.key, in_stream(sampling.key, Stream.DRAFT, of=Stream.TARGET))
    position = torch.where(sampling.is_seeded, num_tokens + index, coins)
    ids: Tensor = gumbel_argmax(scaled[:, None], key, position, noisy, Stream.TARGET, to_target)[0]
    return ids[:, 0]


def _by_coin(scaled: Tensor, key: Tensor, num_tokens: Tensor, index: int) -> Tensor:
    """Draw from the softmax by one uniform number."""
    position = num_tokens * _COINS_PER_POSITION + index
    if has_sampling_operators(scaled.device):
        return cpu_sampling.draw(scaled, cpu_sampling.uniform(key, position, Stream.DRAFT))
    return draw_by_coin(scaled, uniform(key, position, Stream.DRAFT))


def _target_noise(key: Tensor, position: Tensor, to_target: Tensor | None, vocab_size: int) -> Tensor:
    """[R, vocab] of what the target has at a position, for the draft's tokens."""
    return gumbel(key, position, Stream.TARGET, vocab_size if to_target is None else to_target)
