"""The tokens that a head can draft: those that the target writes most often."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from proposers.training.texts import Text


def frequent_tokens(texts: Iterable[Text], vocab_size: int, num_tokens: int) -> Tensor:
    """[at most num_tokens] int64: the target's ids, the most frequent in outputs first, equally frequent ones by id.

    So a smaller vocabulary is a beginning of a larger one. Ids that never occur are left out unless nothing else is
    there to fill it.
    """
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(text.output_ids, minlength=vocab_size)
    order = np.argsort(-counts, kind="stable")
    return torch.from_numpy(order[: min(num_tokens, vocab_size)].copy())


def draft_ids(to_target: Tensor, vocab_size: int) -> Tensor:
    """[vocab_size] int64: the place of each of the target's tokens in a reduced vocabulary, or -1."""
    places = torch.full((vocab_size,), -1, dtype=torch.int64, device=to_target.device)
    places[to_target] = torch.arange(len(to_target), device=to_target.device)
    return places
