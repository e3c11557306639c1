"""How far a draft's distribution is from the target's."""

import torch
from torch import Tensor

_LEAST_OVERLAP = 1e-6


def distance(logits: Tensor, probabilities: Tensor, temperature: float, overlap_weight: float) -> Tensor:
    """A weighted mean of cross-entropy and -log of the probability that a drawn draft is kept, in nats.

    The overlap sum(min(p, q)) is that probability (Leviathan et al. 2023, arXiv:2211.17192); its log is what the log
    of a whole draft's chance is a sum of. Its gradient is at most that of cross-entropy, wherever the two are apart.

    Args:
        logits: [n, vocab], the draft's, before the temperature.
        probabilities: [n, vocab] float32, the target's at the temperature; they may sum to less than 1.
        overlap_weight: from 0, cross-entropy alone, to 1.
    Returns: [n] float32.
    """
    log_draft = (logits.float() / temperature).log_softmax(-1)
    cross_entropy = -(probabilities * log_draft).sum(-1)
    if overlap_weight == 0:
        return cross_entropy
    overlap = torch.minimum(log_draft.exp(), probabilities).sum(-1)
    return (1 - overlap_weight) * cross_entropy - overlap_weight * overlap.clamp(min=_LEAST_OVERLAP).log()
