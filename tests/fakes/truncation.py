"""What truncation must keep, up to the rounding of a sum of probabilities."""

import torch
from torch import Tensor

from server.kernels import reference

TOLERANCE = 1e-5
"""Of top_p: sums of 128,256 probabilities in float32 are off by a few millionths."""


def check_truncated(
    found: Tensor, logits: Tensor, slots: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """Compare a result with the twin in float64, at a top_p slightly lower and slightly higher.

    Args: as of truncate.truncate, for rows of temperatures above 0. Returns: [M, Q], number of tokens kept.
    """
    scaled = logits / temperature[slots, None, None]
    is_kept = found > -torch.inf
    assert torch.equal(found, torch.where(is_kept, scaled, -torch.inf)), "a kept value is the quotient"

    def keep(shift: float) -> Tensor:
        mass = torch.where(top_p < 1, (top_p * (1 + shift)).clamp(max=1 - 1e-9), 1.0)
        kept = reference.restrict(scaled.double(), top_k[slots], mass[slots].double(), min_p[slots].double())
        return kept > -torch.inf

    assert not (keep(-TOLERANCE) & ~is_kept).any(), "left out too much"
    assert not (is_kept & ~keep(TOLERANCE)).any(), "kept too much"
    lowest = torch.where(is_kept, scaled, torch.inf).amin(-1, keepdim=True)
    assert torch.equal(is_kept, (scaled >= lowest) & (scaled > -torch.inf)), "ties are kept together"
    return is_kept.sum(-1)
