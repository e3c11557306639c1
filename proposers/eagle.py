"""EAGLE and EAGLE-3: a decoder layer or a few on the target's hidden states.

Source: Li et al. 2024, arXiv:2401.15077; Li et al. 2025, arXiv:2503.01840.
"""

from pydantic import Field

from proposers.base import TargetView
from proposers.drafting import NetworkProposer
from proposers.eagle_checkpoint import Kind, eagle_head
from proposers.eagle_network import EagleNetwork
from proposers.head_config import HeadConfig
from proposers.network_config import KVNetworkConfig


class EagleConfig(HeadConfig, KVNetworkConfig):
    """Settings of an EAGLE head."""

    disable_eagle_block_drop: bool = Field(
        default=False, description="without effect: a prefix hit never loses a block to this drafter"
    )

    def build(self, target: TargetView) -> NetworkProposer:
        """Load the head. Raises: ConfigError, ModelError."""
        return self._build(target, "eagle")

    def _build(self, target: TargetView, kind: Kind) -> NetworkProposer:
        model = self.target_network(target)
        kv_dtype = self.kv_dtype(target, model.dtype)
        network = EagleNetwork(eagle_head(self.checkpoint(model), model, kind), model, target.device, kv_dtype)
        return NetworkProposer(
            network,
            target,
            num_speculative_tokens=self.num_speculative_tokens,
            is_sampled=self.is_sampled,
            num_features=network.num_features,
            max_num_tokens=self.max_model_len,
        )


class Eagle3Config(EagleConfig):
    """Settings of an EAGLE-3 head."""

    def build(self, target: TargetView) -> NetworkProposer:
        """Load the head. Raises: ConfigError, ModelError."""
        return self._build(target, "eagle3")
