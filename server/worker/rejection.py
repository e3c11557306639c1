"""Which draft tokens the target keeps, and the token that follows them.

`num_drafts` rows may be shorter than the draft tensors; what lies beyond is neither accepted nor
rejected: the next token is then the bonus token of the first position without a draft.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Verified:
    """[n] int64 each: accepted drafts, and the target's own token after them."""

    num_accepted: Tensor
    next_ids: Tensor


def count_accepted(draft_ids: Tensor, num_drafts: Tensor, target_ids: Tensor) -> Tensor:
    """Keep drafts as long as they equal what the target chose at their position.

    With the likeliest tokens as `target_ids` this is greedy decoding. With argmax(log p + Gumbel)
    of a fixed noise per position it is sampling whose tokens do not depend on the drafter.

    Args:
        draft_ids: [n, k] integers. num_drafts: [n] int64, at most k. target_ids: [n, k + 1] int64; the token that
            follows the kept drafts is the one at their number.
    Returns: [n] int64.
    Source: Daliri et al. 2024, arXiv:2408.07978, section 3.
    """
    return _count_leading(draft_ids == target_ids[:, :-1], num_drafts)


def verify_standard(
    draft_ids: Tensor,
    num_drafts: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    uniforms: Tensor,
    resample_noise: Tensor,
) -> Verified:
    """Accept draft d with probability min(1, p(d) / q(d)); on the first rejection draw from max(p - q, 0).

    The kept tokens and the last one are distributed as if drawn from the target one by one.

    Args:
        draft_ids: [n, k] int64. num_drafts: [n] int64, at most k.
        draft_probs: [n, k, vocab] float32, the distributions the drafts were drawn from; None means
            one-hot, as an n-gram proposes.
        target_probs: [n, k + 1, vocab] float32.
        uniforms: [n, k] float32 in (0, 1). resample_noise: [n, vocab] Gumbel noise for the last draw.
    Source: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318, theorem 1.
    """
    num_positions = draft_ids.shape[1]
    index = draft_ids[..., None]
    p = target_probs[:, :num_positions].gather(2, index)[..., 0]
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(2, index)[..., 0]
    accepted = _count_leading(uniforms * q < p, num_drafts)
    weights = _row_at(target_probs, accepted)
    was_rejected = accepted < num_drafts
    if num_positions:
        last = accepted.clamp(max=num_positions - 1)
        if draft_probs is None:
            rejected_id = draft_ids.gather(1, last[:, None])
            draft_row = torch.zeros_like(weights).scatter_(1, rejected_id, weights.gather(1, rejected_id))
        else:
            draft_row = _row_at(draft_probs, last)
        residual = (weights - draft_row).clamp_(min=0)
        has_mass = residual.amax(-1) > 0  # rounding can leave none where p and q are almost equal
        weights = torch.where((was_rejected & has_mass)[:, None], residual, weights)
    return Verified(accepted, (weights.log() + resample_noise).argmax(-1))


def _count_leading(is_kept: Tensor, num_drafts: Tensor) -> Tensor:
    """[n, k] bool, [n] -> [n] int64: length of the leading run of kept drafts."""
    exists = torch.arange(is_kept.shape[1], device=is_kept.device) < num_drafts[:, None]
    return (is_kept & exists).long().cumprod(1).sum(1)


def _row_at(probs: Tensor, position: Tensor) -> Tensor:
    """[n, m, vocab], [n] -> [n, vocab]."""
    return probs.gather(1, position[:, None, None].expand(-1, 1, probs.shape[2]))[:, 0]
