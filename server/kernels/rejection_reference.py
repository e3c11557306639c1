"""Eager twin of the acceptance kernels, on tensors of probabilities; names and arguments are theirs."""

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
    p = target_logits.float().softmax(-1)
    q = _draft_probs(p, draft_ids, draft_logits, to_draft)
    chance = torch.ones_like(p[:, :, 0])
    if method == Method.SYNTHETIC:
        assert rates is not None
        before = torch.cat((rates.new_ones(1), rates[:-1]))[:k]
        num_accepted = _count_leading(uniforms * before < rates, num_drafts)
    elif method == Method.STANDARD:
        num_accepted = _count_leading(uniforms * _at(q, draft_ids) < _at(p[:, :k], draft_ids), num_drafts)
    else:
        chance = _chances(_at(p[:, :k], draft_ids), _at(q, draft_ids))
        num_accepted = _count_block(p, q, chance, uniforms, num_drafts)
    if k == 0:
        return num_accepted, log_p[:, 0]
    row = torch.arange(p.shape[0], device=p.device)
    weights, last = log_p[row, num_accepted], num_accepted.clamp(max=k - 1)
    residual = chance[row, num_accepted, None] * p[row, num_accepted] - q[row, last]
    left = torch.where(residual > 0, residual.log(), weights - UNLIKELY)
    is_residual = (num_accepted < num_drafts) & (method != Method.SYNTHETIC)
    return num_accepted, torch.where(is_residual[:, None], left, weights)


def _draft_probs(p: Tensor, draft_ids: Tensor, draft_logits: Tensor | None, to_draft: Tensor | None) -> Tensor:
    """[M, k, vocab], in the target's vocabulary."""
    if draft_logits is None:
        return torch.nn.functional.one_hot(draft_ids.clamp(min=0), p.shape[2]).float()
    q = draft_logits.float().softmax(-1)
    if to_draft is None:
        return q
    return torch.where(to_draft >= 0, q[:, :, to_draft.clamp(min=0).long()], 0)


def _at(probs: Tensor, draft_ids: Tensor) -> Tensor:
    """[M, k], the drafts' own probabilities."""
    return probs.gather(2, draft_ids.clamp(min=0)[..., None])[..., 0]


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


def _count_block(p: Tensor, q: Tensor, chance: Tensor, uniforms: Tensor, num_drafts: Tensor) -> Tensor:
    """[M] int64: length of the longest beginning whose coin falls in its favour."""
    num_accepted = torch.zeros_like(num_drafts)
    k = q.shape[1]
    for i in range(1, k + 1):
        mass = (chance[:, i, None] * p[:, i] - q[:, min(i, k - 1)]).clamp(min=0).sum(-1)
        whole = mass + (1 - chance[:, i])
        share = torch.where(whole > 0, mass / whole, 1.0)
        share = torch.where(i < num_drafts, share, chance[:, i])
        num_accepted = torch.where((uniforms[:, i - 1] < share) & (i <= num_drafts), i, num_accepted)
    return num_accepted
