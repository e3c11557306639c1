"""Eager twin of the acceptance kernels and of the operators for the CPU; names and arguments are theirs."""

import torch
from torch import Tensor

from server.kernels.rejection import UNLIKELY, Method


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
    """See rejection.verify_drafts."""
    k = draft_ids.shape[1]
    log_p = target_logits.float().log_softmax(-1)
    p = log_p[:, :k].gather(2, draft_ids.clamp(min=0)[..., None])[..., 0].exp()
    drafter = _Drafter(draft_ids, draft_logits, to_draft)
    chance = torch.ones_like(log_p[:, :, 0])
    if method == Method.SYNTHETIC:
        assert rates is not None
        before = torch.cat((rates.new_ones(1), rates[:-1]))[:k]
        num_accepted = _count_leading(uniforms * before < rates, num_drafts)
    elif method == Method.STANDARD:
        num_accepted = _count_leading(uniforms * drafter.chosen_probs < p, num_drafts)
    else:
        chance = _chances(p, drafter.chosen_probs)
        num_accepted = _count_block(log_p, drafter, chance, uniforms, num_drafts)
    row = torch.arange(log_p.shape[0], device=log_p.device)
    weights = log_p[row, num_accepted]
    if k == 0 or method == Method.SYNTHETIC:
        return num_accepted, weights
    last = num_accepted.clamp(max=k - 1)
    residual = drafter.subtract_from(chance[row, num_accepted, None] * weights.exp(), last)
    left = torch.where(residual > 0, residual.log(), weights - UNLIKELY)
    return num_accepted, torch.where((num_accepted < num_drafts)[:, None], left, weights)


def draw(log_weights: Tensor, coins: Tensor) -> Tensor:
    """One token for each row of [n, vocab] by one uniform number, [n] float32; see cpu_sampling.draw."""
    total = log_weights.softmax(-1).double().cumsum(-1)  # in float64, so that the coin never falls behind the last one
    ids = torch.searchsorted(total, coins.double()[:, None] * total[:, -1:], right=True)
    return ids[:, 0].clamp(max=log_weights.shape[1] - 1)


class _Drafter:
    """What the drafts were drawn from.

    Attributes:
        chosen_probs: [M, k], the drafts' own probabilities.
    """

    def __init__(self, draft_ids: Tensor, draft_logits: Tensor | None, to_draft: Tensor | None) -> None:
        self._ids = draft_ids.clamp(min=0)
        self._to_draft = to_draft
        self._probs = None if draft_logits is None else draft_logits.float().softmax(-1)
        if self._probs is None:
            self.chosen_probs = torch.ones_like(draft_ids, dtype=torch.float32)
            return
        ids = self._ids if to_draft is None else to_draft.long()[self._ids]
        found = self._probs.gather(2, ids.clamp(min=0)[..., None])[..., 0]
        self.chosen_probs = torch.where(ids >= 0, found, 0)

    def subtract_from(self, weights: Tensor, position: Tensor) -> Tensor:
        """[M, vocab] less what the drafter gave each token at a [M] position."""
        row = torch.arange(weights.shape[0], device=weights.device)
        if self._probs is None:
            rejected = self._ids[row, position][:, None]
            return weights.scatter_add(1, rejected, torch.full_like(rejected, -1, dtype=weights.dtype))
        q = self._probs[row, position]
        if self._to_draft is not None:
            q = torch.where(self._to_draft >= 0, q[:, self._to_draft.clamp(min=0).long()], 0)
        return weights - q


def _count_leading(is_kept: Tensor, num_drafts: Tensor) -> Tensor:
    """[M] int64: length of the leading run of kept drafts."""
    exists = torch.arange(is_kept.shape[1], device=is_kept.device) < num_drafts[:, None]
    return (is_kept & exists).long().cumprod(1).sum(1)


def _chances(p: Tensor, q: Tensor) -> Tensor:
    """[M, k + 1], the chance of each beginning of the block to be kept, or more of it."""
    chances = [torch.ones_like(p[:, 0]) if p.shape[1] else p.new_ones(p.shape[0])]
    for i in range(p.shape[1]):
        grown = chances[-1] * p[:, i]
        chance = torch.where(grown < q[:, i], grown / q[:, i], 1.0)
        chances.append(torch.where(p[:, i] > 0, chance, 0.0))
    return torch.stack(chances, 1)


def _count_block(log_p: Tensor, drafter: _Drafter, chance: Tensor, uniforms: Tensor, num_drafts: Tensor) -> Tensor:
    """[M] int64: length of the longest beginning whose coin falls in its favour."""
    num_accepted = torch.zeros_like(num_drafts)
    k = uniforms.shape[1]
    for i in range(1, k + 1):
        position = torch.full_like(num_drafts, min(i, k - 1))
        mass = drafter.subtract_from(chance[:, i, None] * log_p[:, i].exp(), position).clamp(min=0).sum(-1)
        whole = mass + (1 - chance[:, i])
        share = torch.where(whole > 0, mass / whole, 1.0)
        share = torch.where(i < num_drafts, share, chance[:, i])
        num_accepted = torch.where((uniforms[:, i - 1] < share) & (i <= num_drafts), i, num_accepted)
    return num_accepted
