"""EAGLE and EAGLE-3: a decoder layer or a few on the target's hidden states.

Source: Li et al. 2024, arXiv:2401.15077; Li et al. 2025, arXiv:2503.01840.
"""

from typing import ClassVar

from pydantic import Field

from proposers.base import TargetOutline, TargetView
from proposers.drafting import NetworkProposer
from proposers.eagle_checkpoint import Kind, eagle_head
from proposers.eagle_network import EagleNetwork, check_weights
from proposers.head_config import HeadConfig
from proposers.network_config import KVNetworkConfig


class EagleConfig(HeadConfig, KVNetworkConfig):
    """Settings of an EAGLE head. Attributes: kind: of head."""

    kind: ClassVar[Kind] = "eagle"

    disable_eagle_block_drop: bool = Field(
        default=False, description="without effect: a prefix hit never loses a block to this drafter"
    )

    def check(self, target: TargetOutline) -> None:
        """Read the head, and see that it is one for this target. Raises: ConfigError, ModelError."""
        super().check(target)
        check_weights(eagle_head(self.checkpoint(target.digest), target, self.kind), target.config.hidden_size)

    def build(self, target: TargetView) -> NetworkProposer:
        """Load the head. Raises: ConfigError, ModelError."""
        model = self.target_network(target)
        kv_dtype = self.kv_dtype(target, model.dtype)
        head = eagle_head(self.checkpoint(lambda: model.digest), model, self.kind)
        network = EagleNetwork(head, model, target.device, kv_dtype)
        return NetworkProposer(
            network,
            target,
            num_speculative_tokens=self.num_speculative_tokens,
            is_sampled=self.is_sampled,
            num_features=network.num_features,
            max_num_tokens=self.max_model_len,
            least_certainty=self.draft_min_certainty,
        )


class Eagle3Config(EagleConfig):
    """Settings of an EAGLE-3 head."""

    kind: ClassVar[Kind] = "eagle3"
