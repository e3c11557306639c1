"""Proposers as another distribution would bring them: known to nobody but by module:Class."""

from collections.abc import Sequence

import torch
from pydantic import Field

from proposers.base import Draft, HostProposer, ProposeInput, SequenceText, TargetView
from proposers.config import ProposerConfig


class RepeatConfig(ProposerConfig):
    """Settings of the proposer that says the last token again."""

    def build(self, target: TargetView) -> "RepeatProposer":
        """Drafts for any target."""
        return RepeatProposer(self.num_speculative_tokens)


class RepeatProposer:
    """The last token again and again, on the device; implements proposers.base.Proposer."""

    runs_on_device = True
    vocabulary = None

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    def propose(self, inputs: ProposeInput) -> Draft:
        """As often as allowed."""
        last = inputs.token_ids[inputs.slots, inputs.num_tokens - 1]
        place = torch.arange(self.num_speculative_tokens, device=last.device)
        counts = inputs.max_drafts.clamp(max=self.num_speculative_tokens)
        return Draft(torch.where(place < counts[:, None], last[:, None], -1).int(), counts)


class PeriodConfig(ProposerConfig):
    """Settings of the proposer that says again what was said a few tokens ago."""

    period: int = Field(default=3, ge=1, le=100, description="how many tokens ago")

    def build(self, target: TargetView) -> "PeriodProposer":
        """Drafts for any target."""
        return PeriodProposer(self.num_speculative_tokens, self.period)


class PeriodProposer(HostProposer):
    """What was said `period` tokens ago, on the host."""

    def __init__(self, num_speculative_tokens: int, period: int) -> None:
        self._k = num_speculative_tokens
        self._period = period
        self._texts: dict[int, list[int]] = {}

    @property
    def num_speculative_tokens(self) -> int:
        """As configured."""
        return self._k

    def start(self, slot: int, text: SequenceText) -> None:
        """Keep the text."""
        self._texts[slot] = list(text.token_ids)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Keep more of it."""
        self._texts[slot] += token_ids

    def propose(self, slot: int, max_drafts: int) -> list[int]:
        """One period at most."""
        return self._texts[slot][-self._period :][:max_drafts]
