"""The target's own first layers as the draft: no weights, and no K and V but the target's.

What the first layers keep for a draft is what they keep for it when the target verifies it, so both use one cache.
"""

import copy

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedConfig

from proposers.base import Draft, DraftVocabulary, ProposeInput, TargetModel, TargetOutline, TargetView
from proposers.draft_chain import DraftChain
from proposers.network import BatchMemory
from proposers.network_config import ChainConfig
from server.errors import ConfigError
from server.model.attention import AttentionStep
from server.model.decoder_layers import find_decoder_layers
from server.model.early_exit import runs_all_layers
from server.model.forward import run_model
from server.model.layer_check import run_prompt


class LayerSkipConfig(ChainConfig):
    """Settings of drafting with some first layers."""

    num_layers: int = Field(ge=1, description="decoder layers of the target that draft, from the first on")

    def check(self, target: TargetOutline) -> None:
        """The target has more layers, and can be left early. Raises: ConfigError."""
        super().check(target)
        most = target.config.num_hidden_layers - 1
        if self.num_layers > most:
            raise ConfigError(
                f"num_layers: must be from 1 to {most}, as the target has {most + 1} layers, got {self.num_layers}"
            )
        if runs_all_layers(target.config, trusts_code=target.trusts_code):
            raise ConfigError(f"method: {_refusal(target.config)}")

    def build(self, target: TargetView) -> "LayerSkipProposer":
        """Any target will do that runs its layers in a loop. Raises: ConfigError."""
        return LayerSkipProposer(FirstLayers(self.target_network(target), self.num_layers), target, self)


class FirstLayers:
    """Embedding, some first layers, norm and head of the target; a proposers.network.ChainNetwork."""

    def __init__(self, target: TargetModel, num_layers: int) -> None:
        """Args: num_layers: fewer than the target has."""
        # A second object on the same modules: what is packed or compiled later, is so for both.
        self._decoder = copy.copy(target.model.base_model)
        self._decoder.config = copy.copy(self._decoder.config)
        self._decoder.config.num_hidden_layers = num_layers
        self._head = target.head
        self._next_layer = find_decoder_layers(target.model, target.config.num_hidden_layers)[num_layers]
        self.max_num_tokens = target.max_num_tokens
        self.to_target: Tensor | None = None

    def forward(self, token_ids: Tensor, positions: Tensor, step: AttentionStep, hidden: Tensor | None) -> Tensor:
        """Run over flat tokens, keeping their K and V where the target does."""
        outputs: Tensor = run_model(self._decoder, token_ids, positions, step).last_hidden_state[0]
        return outputs

    @torch.inference_mode()
    def check(self) -> None:
        """See that the other layers do not run; writes to block 0 of the target's KV.

        Raises: ConfigError if they do.
        """
        ran: list[object] = []
        handle = self._next_layer.register_forward_pre_hook(lambda *_: ran.append(None))
        try:
            run_prompt(self._decoder, 1)
        finally:
            handle.remove()
        if ran:
            raise ConfigError(f"speculative_config.method: {_refusal(self._decoder.config)}")

    def logits(self, hidden: Tensor) -> Tensor:
        """By the target's head."""
        return self._head.logits(hidden)


class LayerSkipProposer:
    """Drafts with the target's first layers; implements proposers.base.Proposer.

    The target has not computed a sequence's newest token yet, so drafting begins with that.
    Source: Elhoushi et al. 2024, arXiv:2404.16710, without the training for it.
    """

    runs_on_device = True
    writes_kv = True

    def __init__(self, layers: FirstLayers, target: TargetView, config: LayerSkipConfig) -> None:
        """Args: config: of the proposer."""
        self._layers = layers
        self._memory: BatchMemory | None = None
        self._k = config.num_speculative_tokens
        limit = min(layers.max_num_tokens, config.max_model_len or layers.max_num_tokens)
        self._chain = DraftChain(
            layers,
            target,
            num_drafts=self._k,
            is_sampled=config.is_sampled,
            limit=limit,
            least_certainty=config.draft_min_certainty,
        )

    @property
    def num_speculative_tokens(self) -> int:
        """Most tokens proposed per step."""
        return self._k

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The target's, if drafts are drawn."""
        return self._chain.vocabulary

    def bind(self, memory: BatchMemory) -> None:
        """Draft for this batch, in the blocks of the target's KV cache."""
        self._layers.check()
        self._memory = memory

    def propose(self, inputs: ProposeInput) -> Draft:
        """Draft behind the newest token of each sequence."""
        assert self._memory is not None, "bind comes first"
        return self._chain.draft(inputs, self._memory)


def _refusal(config: PreTrainedConfig) -> str:
    return f"layer_skip cannot leave out layers of {config.model_type}, which always runs all of them"
