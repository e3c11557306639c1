"""A proposer whose drafts are as good as random: what the worst of all proposers costs."""

import torch

from proposers.base import Draft, ProposeInput, TargetView
from proposers.config import ProposerConfig

_FACTORS = (0x9E3779B97F4A7C1, 0xC2B2AE3D27D4EB5, 0x165667B19E3779F)
"""Odd, and large enough that neighbouring positions have nothing in common."""


class RandomConfig(ProposerConfig):
    """Settings of random drafts."""

    def build(self, target: TargetView) -> "RandomProposer":
        """Drafts for every target."""
        return RandomProposer(self.num_speculative_tokens, target.vocab_size)


class RandomProposer:
    """Always as many drafts as allowed, a function of position and last token; implements proposers.base.Proposer."""

    runs_on_device = True
    vocabulary = None

    def __init__(self, num_speculative_tokens: int, vocab_size: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._vocab_size = vocab_size

    def propose(self, inputs: ProposeInput) -> Draft:
        """Draft without looking at the text."""
        place = torch.arange(self.num_speculative_tokens, device=inputs.slots.device)
        last = inputs.token_ids[inputs.slots, inputs.num_tokens - 1].long()
        mixed = (inputs.num_tokens[:, None] + place) * _FACTORS[0] + last[:, None] * _FACTORS[1]
        mixed = (mixed ^ (mixed >> 32)) * _FACTORS[2]
        counts = inputs.max_drafts.clamp(max=self.num_speculative_tokens)
        ids = (mixed >> 20) % self._vocab_size
        return Draft(torch.where(place < counts[:, None], ids, -1).int(), counts.int())
