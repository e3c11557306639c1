"""Draws one draft for each of several sequences, so that what verifies them can make up for how they were drawn."""

from typing import NamedTuple

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


class Drawn(NamedTuple):
    """One token for each of R sequences.

    Attributes:
        ids: [R] int64 in the draft's vocabulary. logits: [R, vocab], whose softmax they were drawn from.
        best: [R], finite where the logits are usable.
    """

    ids: Tensor
    logits: Tensor
    best: Tensor


class Draws:
    """How a step's drafts are drawn for R sequences.

    Greedy sequences get the likeliest token. Those with a seed get the token that the target's own noise at its
    position picks from the draft's distribution (Daliri et al. 2024, arXiv:2408.07978): where the two distributions
    agree, so do the tokens. The others draw by a coin of their own, which nothing else depends on.
    """

    def __init__(self, sampling: DraftSampling, num_tokens: Tensor, to_target: Tensor | None) -> None:
        """Args:
        num_tokens: [R] int64.
        to_target: [vocab] int64, the target's id of each token; None where they are the same.
        """
        self._sampling = sampling
        self._num_tokens = num_tokens
        self._to_target = to_target
        self._is_greedy = sampling.temperature == 0
        self._divisor = torch.where(self._is_greedy, 1.0, sampling.temperature)[:, None]
        self._by_kernel: tuple[Tensor, Tensor, Tensor] | None = None
        if jit.is_available(num_tokens.device):  # Gumbel noise for all, in one pass; a noise of 0 makes a row greedy
            own = in_stream(sampling.key, Stream.DRAFT, of=Stream.TARGET)
            key = torch.where(sampling.is_seeded, sampling.key, own)
            first = torch.where(sampling.is_seeded, num_tokens, num_tokens * _COINS_PER_POSITION)
            self._by_kernel = key, first, (sampling.temperature > 0).float()

    def draw(self, logits: Tensor, index: int) -> Drawn:
        """Args: logits: [R, vocab] float32. index: of the draft among the step's."""
        scaled = logits / self._divisor
        if self._by_kernel is not None:
            key, first, noise = self._by_kernel
            ids, best = gumbel_argmax(scaled[:, None], key, first + index, noise, Stream.TARGET, self._to_target)
            return Drawn(ids[:, 0], scaled, best[:, 0])
        sampling, ids = self._sampling, scaled.argmax(-1)
        if sampling.has_unseeded:
            drawn = _by_coin(scaled, sampling.key, self._num_tokens, index)
            ids = torch.where(self._is_greedy | sampling.is_seeded, ids, drawn)
        if sampling.has_seeded:
            noise = _target_noise(sampling.key, self._num_tokens + index, self._to_target, scaled.shape[1])
            ids = torch.where(sampling.is_seeded & ~self._is_greedy, (scaled + noise).argmax(-1), ids)
        return Drawn(ids, scaled, logits.amax(-1))


def _by_coin(scaled: Tensor, key: Tensor, num_tokens: Tensor, index: int) -> Tensor:
    """Draw from the softmax by one uniform number."""
    position = num_tokens * _COINS_PER_POSITION + index
    if has_sampling_operators(scaled.device):
        return cpu_sampling.draw(scaled, cpu_sampling.uniform(key, position, Stream.DRAFT))
    return draw_by_coin(scaled, uniform(key, position, Stream.DRAFT))


def _target_noise(key: Tensor, position: Tensor, to_target: Tensor | None, vocab_size: int) -> Tensor:
    """[R, vocab] of what the target has at a position, for the draft's tokens."""
    return gumbel(key, position, Stream.TARGET, vocab_size if to_target is None else to_target)
