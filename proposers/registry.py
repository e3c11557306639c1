"""Proposers by the name they have in the configuration."""

from proposers.base import Proposer
from proposers.ngram import NgramProposer
from server.config import SpeculativeConfig


def build_proposer(config: SpeculativeConfig) -> Proposer:
    """The proposer that a configuration names."""
    return NgramProposer(
        config.num_speculative_tokens,
        config.prompt_lookup_min,
        config.prompt_lookup_max,
        takes_last=config.match == "last",
    )
