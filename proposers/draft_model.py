"""A smaller language model that drafts."""

from pydantic import Field
from torch import Tensor

from proposers.base import TargetView
from proposers.drafting import NetworkProposer
from proposers.network import Features, KVShape
from proposers.network_config import NetworkConfig
from server.config import ModelConfig
from server.errors import ConfigError
from server.model.attention import AttentionStep, bind_kv
from server.model.forward import run_model
from server.model.fusion import can_pack, merge_linears, pack_linears
from server.model.head import LMHead
from server.model.loader import LoadedModel, load_model


class DraftModelConfig(NetworkConfig):
    """Settings of a draft model."""

    model: str = Field(min_length=1, description="folder, GGUF file or Hugging Face id of the draft model")
    revision: str | None = Field(default=None, description="branch, tag or commit of a Hugging Face repository")

    def build(self, target: TargetView) -> NetworkProposer:
        """Load the model. Raises: ConfigError, ModelError."""
        network = self.target_network(target)
        given = ModelConfig(model=self.model, revision=self.revision, trust_remote_code=network.trusts_code)
        loaded = load_model(given, target.device, network.dtype)
        if loaded.vocab_size != target.vocab_size:
            raise ConfigError(
                f"speculative_config.model: {self.model} has a vocabulary of {loaded.vocab_size} tokens, "
                f"the target one of {target.vocab_size}"
            )
        return NetworkProposer(
            CausalNetwork(loaded, runs_plain=network.runs_plain),
            target,
            num_speculative_tokens=self.num_speculative_tokens,
            is_sampled=self.is_sampled,
            max_num_tokens=self.max_model_len,
        )


class CausalNetwork:
    """A causal language model of the target's vocabulary; implements proposers.network.DraftNetwork."""

    def __init__(self, loaded: LoadedModel, *, runs_plain: bool) -> None:
        """Args: runs_plain: whether its modules are to stay as they are, neither merged nor packed."""
        self._loaded = loaded
        self._model = loaded.model
        is_packed = can_pack(self._model.device) and not runs_plain
        if is_packed:
            pack_linears(self._model.base_model)
        elif self._model.device.type == "cuda" and not runs_plain:
            merge_linears(self._model.base_model)
        self._head = LMHead.of(self._model, loaded.config, is_packed=is_packed)

    @property
    def kv_shape(self) -> KVShape:
        """That of the model."""
        loaded = self._loaded
        return KVShape(loaded.num_layers, loaded.num_kv_heads, loaded.head_dim, self._model.dtype)

    @property
    def features(self) -> Features:
        """It reads tokens only."""
        return None

    @property
    def max_num_tokens(self) -> int:
        """Positions the model was made for."""
        return self._loaded.max_position_embeddings

    @property
    def to_target(self) -> Tensor | None:
        """The vocabularies are the same."""
        return None

    def bind_kv(self, kv: Tensor) -> None:
        """Use this memory for K and V."""
        bind_kv(self._model.base_model, kv)

    def condense(self, features: Tensor) -> Tensor:
        """There is nothing to condense."""
        return features

    def forward(self, token_ids: Tensor, positions: Tensor, step: AttentionStep, hidden: Tensor | None) -> Tensor:
        """The model's last hidden states."""
        outputs: Tensor = run_model(self._model.base_model, token_ids, positions, step).last_hidden_state[0]
        return outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own."""
        return self._head.logits(hidden)
