"""What the settings of proposers that are networks have in common; names are vLLM's."""

from typing import Literal

import torch
from pydantic import Field

from proposers.base import TargetModel, TargetOutline, TargetView
from proposers.config import ProposerConfig
from server.config import KVCacheDtype
from server.errors import ConfigError
from server.model.device import choose_kv_dtype


class NetworkConfig(ProposerConfig):
    """Settings of a network that drafts."""

    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        default="probabilistic",
        description="probabilistic draws the drafts of sampled requests from the network's distribution, greedy takes "
        "its likeliest tokens",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="sequences from this length on get no drafts, in tokens; the network's own limit",
    )
    draft_tensor_parallel_size: int | None = Field(
        default=None, ge=1, description="devices that the network is spread over: 1 on the native engine"
    )

    @property
    def is_sampled(self) -> bool:
        """Whether drafts are drawn."""
        return self.draft_sample_method == "probabilistic"

    def check(self, target: TargetOutline) -> None:
        """There is one device. Raises: ConfigError."""
        if self.draft_tensor_parallel_size not in (None, 1):
            raise ConfigError(
                "draft_tensor_parallel_size: must be 1, as the model runs on one device, "
                f"got {self.draft_tensor_parallel_size}"
            )

    def target_network(self, target: TargetView) -> TargetModel:
        """The target. Raises: ConfigError if it is not at hand."""
        if target.network is None:
            raise ConfigError(f"method: {self.method} needs the target in this process")
        return target.network


class ChainConfig(NetworkConfig):
    """Settings of a network that drafts token by token."""

    draft_min_certainty: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="a sequence gets no further drafts in a step once the product of the network's largest "
        "probabilities, one for each draft, is below this",
    )


class KVNetworkConfig(ChainConfig):
    """Settings of a network that keeps K and V of its own."""

    kv_cache_dtype: KVCacheDtype = Field(
        default="auto", description="type of the K and V that the network keeps; auto is the type it computes in"
    )

    def check(self, target: TargetOutline) -> None:
        """There is one device, and it knows the type of K and V. Raises: ConfigError."""
        super().check(target)
        self.kv_dtype(target, target.dtype)

    def kv_dtype(self, target: TargetOutline | TargetView, dtype: torch.dtype) -> torch.dtype:
        """What K and V of a network computed in `dtype` are kept in. Raises: ConfigError."""
        return choose_kv_dtype(self.kv_cache_dtype, target.device, dtype, "kv_cache_dtype")
