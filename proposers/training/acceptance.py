"""How many drafts would be kept, from texts that the target wrote: no engine, every place at a time.

Drafts behind a place are only looked at while all before them were kept, and then they are the text itself. So one
unrolled pass per draft over the text is what a server would compute. A sampled draft is kept, given that the target
said x, with probability min(1, q(x) / p(x)) (Leviathan et al. 2023, arXiv:2211.17192).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proposers.training.eagle_trainee import EagleTrainee
from proposers.training.measures import Tally
from proposers.training.medusa_trainee import MedusaTrainee
from proposers.training.packing import PackedRows
from proposers.training.target import Features
from proposers.training.unrolled_attention import shift
from proposers.training.vocabulary import draft_ids


class Drafter:
    """Says how likely a head's drafts are kept, over packed rows."""

    def __init__(self, trainee: EagleTrainee | MedusaTrainee, vocab_size: int, temperature: float) -> None:
        """Args: vocab_size: the target's. temperature: that of sampled texts and of the features."""
        self._trainee = trainee
        self._ids = draft_ids(trainee.to_target, vocab_size)
        self._temperature = temperature

    @torch.no_grad()
    def chances(self, rows: PackedRows, features: Features, k: int) -> "Chances":
        """Of the first k drafts behind each place."""
        following = self._ids[rows.token_ids.roll(-1, 1)]
        is_known, index_of = following >= 0, following.clamp(min=0)[..., None]
        likeliest, drawn = [], []
        for index, logits in enumerate(self._logits(rows, features, k)):
            has_draft = is_known & (rows.positions > index)
            scaled = logits.float() / self._temperature
            log_draft = scaled.gather(-1, index_of)[..., 0] - scaled.logsumexp(-1)
            ratio = (log_draft - features.log_chance).exp().clamp(max=1)
            likeliest.append(shift(has_draft & (scaled.argmax(-1) == following), 1, 1))
            drawn.append(shift(ratio * has_draft, 1, 1))
        return Chances(torch.stack(likeliest).cpu().numpy(), torch.stack(drawn).cpu().numpy())

    def _logits(self, rows: PackedRows, features: Features, k: int) -> Iterator[Tensor]:
        """[B, L, vocab], draft by draft, of the token behind each place."""
        if isinstance(self._trainee, EagleTrainee):
            for made in self._trainee.unroll(rows, features, k):
                yield self._trainee.logits(made)
        else:
            # Head j foretells from the hidden state that is j + 1 places further back.
            for index, state in enumerate(self._trainee.states(features.last)[:k]):
                yield shift(self._trainee.logits(state), 1 + index, 1)

    @property
    def most_drafts(self) -> int | None:
        """As many as there are heads; None where there is no limit."""
        return None if isinstance(self._trainee, EagleTrainee) else len(self._trainee.blocks)


class Chances(NamedTuple):
    """What becomes of drafts, by draft, row and place of the token that is drafted: [k, B, L] each.

    Attributes:
        is_likeliest: bool, whether a greedy draft is the token.
        kept: float32, the probability that a drawn draft is kept, given the token.
    """

    is_likeliest: npt.NDArray[np.bool_]
    kept: npt.NDArray[np.float32]


def walk(is_kept: npt.NDArray[np.bool_], first: int, tally: Tally) -> None:
    """Go through a text as a server would, a step after the other.

    Steps that the end of the text cuts short are left out.

    Args:
        is_kept: [at least k, n], by draft and token, whether the draft for that token is kept.
        first: the token that the first drafts are for: the one behind the first that was generated.
    """
    place, length, k = first, is_kept.shape[1], tally.k
    while place + k < length:
        num_kept = 0
        while num_kept < k and is_kept[num_kept, place + num_kept]:
            num_kept += 1
        tally.add(num_kept)
        place += num_kept + 1
