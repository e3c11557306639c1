"""Medusa: a head for each of the next tokens, all on the target's last hidden state.

Source: Cai et al. 2024, arXiv:2401.10774.
"""

import torch
from pydantic import Field
from torch import Tensor

from proposers.base import Draft, DraftVocabulary, ProposeInput, TargetOutline, TargetView
from proposers.draft_sampling import Draws
from proposers.head_config import HeadConfig
from proposers.medusa_heads import MedusaHeads, medusa_heads, medusa_weights
from server.errors import ConfigError


class MedusaConfig(HeadConfig):
    """Settings of Medusa heads."""

    num_speculative_tokens: int = Field(
        default=3, ge=1, le=32, description="most draft tokens per step, each by a head"
    )

    def check(self, target: TargetOutline) -> None:
        """Read the heads; they are for this target, and as many as drafts. Raises: ConfigError, ModelError."""
        super().check(target)
        checkpoint = self.checkpoint(target.digest)
        num_heads = medusa_weights(checkpoint, target).num_heads
        if self.num_speculative_tokens > num_heads:
            raise ConfigError(
                f"num_speculative_tokens: must be at most {num_heads}, the number of heads in {checkpoint.folder}, "
                f"got {self.num_speculative_tokens}"
            )

    def build(self, target: TargetView) -> "MedusaProposer":
        """Load the heads. Raises: ConfigError, ModelError."""
        model = self.target_network(target)
        return MedusaProposer(self, medusa_heads(self.checkpoint(lambda: model.digest), model, target.device), target)


class MedusaProposer:
    """Drafts all tokens at a time, each without regard to the others; implements proposers.base.Proposer.

    The hidden state a sequence's last token was chosen by is what the heads were trained on: where the target's own
    output projection says that token, the first head says the one behind it.

    Attributes:
        num_speculative_tokens: most tokens proposed per step, each by a head.
        vocabulary: what drafts are drawn from; None where they are the likeliest tokens.
    """

    runs_on_device = True
    needs_hidden = True

    def __init__(self, config: MedusaConfig, heads: MedusaHeads, target: TargetView) -> None:
        self.num_speculative_tokens = config.num_speculative_tokens
        self.vocabulary = DraftVocabulary.of(heads.to_target, target.vocab_size) if config.is_sampled else None
        self._heads = heads
        self._limit = config.max_model_len

    def propose(self, inputs: ProposeInput) -> Draft:
        """As many drafts as are wanted."""
        assert inputs.hidden is not None, "it needs hidden states, and says so"
        k = self.num_speculative_tokens
        width = k if inputs.num_proposed is None else min(k, inputs.num_proposed)
        logits = self._heads.logits(inputs.hidden, width)
        ids, drawn_from = self._choose(logits, inputs)
        to_target = self._heads.to_target
        if to_target is not None:
            ids = to_target[ids]
        counts = torch.isfinite(logits.amax(-1)).long().cumprod(1).sum(1)
        counts = torch.minimum(counts, inputs.max_drafts.long())
        if self._limit is not None:
            counts = torch.minimum(counts, (self._limit - inputs.num_tokens).clamp(min=0))
        is_draft = torch.arange(width, device=ids.device) < counts[:, None]
        return Draft(torch.where(is_draft, ids, -1).int(), counts.int(), drawn_from)

    def _choose(self, logits: Tensor, inputs: ProposeInput) -> tuple[Tensor, Tensor | None]:
        """[R, width] in the heads' vocabulary, and what they were drawn from, where that is asked for."""
        sampling = inputs.sampling
        if self.vocabulary is None or sampling is None:
            return logits.argmax(-1), None
        draws = Draws(sampling, inputs.num_tokens, self._heads.to_target)
        drawn = [draws.draw(logits[:, index], index) for index in range(logits.shape[1])]
        ids = torch.stack([each.ids for each in drawn], dim=1)
        return ids, torch.stack([each.logits for each in drawn], dim=1) if sampling.has_unseeded else None
