"""What every proposer's settings have in common. Knows no proposer, and imports none of their libraries."""

from typing import TYPE_CHECKING

from pydantic import Field

from server.config_values import Section

if TYPE_CHECKING:
    from proposers.base import HostProposer, Proposer, TargetView


class ProposerConfig(Section):
    """Settings of one proposer; a proposer's own class adds fields and says how it is built."""

    method: str = Field(min_length=1, description="the proposer's name, or module:Class of its settings")
    num_speculative_tokens: int = Field(default=5, ge=1, le=32, description="most draft tokens per step")

    def build(self, target: "TargetView") -> "Proposer | HostProposer":
        """The proposer for a target. Raises: ConfigError if it can not draft for this one."""
        raise NotImplementedError
