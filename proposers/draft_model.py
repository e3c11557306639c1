"""A smaller language model that drafts."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pydantic import Field
from torch import Tensor

from proposers.base import TargetOutline, TargetView
from proposers.drafting import NetworkProposer
from proposers.network import Features, KVShape
from proposers.network_config import KVNetworkConfig
from proposers.vocab_mapping import VocabularyMapping, check_same_vocabulary, check_shared_tokens, map_vocabularies
from server.config import ModelConfig
from server.errors import ModelError
from server.model.attention import AttentionStep, bind_kv, is_traced
from server.model.forward import run_model
from server.model.fusion import can_pack, pack_linears
from server.model.head import LMHead
from server.model.loader import LoadedModel, ModelFiles, find_model, load_files
from server.model.skinny_linears import fuse_linears
from server.model.traced_layers import trace_layers


class DraftModelConfig(KVNetworkConfig):
    """Settings of a draft model."""

    model: str = Field(min_length=1, description="folder, GGUF file or Hugging Face id of the draft model")
    revision: str | None = Field(default=None, description="branch, tag or commit of a Hugging Face repository")
    use_heterogeneous_vocab: bool = Field(
        default=False, description="draft with the tokens that the model's tokenizer and the target's have in common"
    )

    def check(self, target: TargetOutline) -> None:
        """Fetch the model, and see that it can be served and writes in the target's tokens.

        Raises: ConfigError, ModelError.
        """
        super().check(target)
        with _named():
            files = self._find(target.device, target.dtype, trusts_code=target.trusts_code)
        check = check_shared_tokens if self.use_heterogeneous_vocab else check_same_vocabulary
        check(target.tokenizer, files.tokenizer, target.config.vocab_size, files.config.vocab_size)

    def build(self, target: TargetView) -> NetworkProposer:
        """Load the model. Raises: ConfigError, ModelError."""
        network = self.target_network(target)
        with _named():
            files = self._find(target.device, network.dtype, trusts_code=network.trusts_code)
            loaded = load_files(files, target.device, network.dtype)
        kv_dtype = self.kv_dtype(target, loaded.model.dtype)
        drafter = CausalNetwork(loaded, kv_dtype, self._mapping(loaded, target), runs_plain=network.runs_plain)
        if is_traced(network.model):
            drafter.trace(network.block_size)
        return NetworkProposer(
            drafter,
            target,
            num_speculative_tokens=self.num_speculative_tokens,
            is_sampled=self.is_sampled,
            max_num_tokens=self.max_model_len,
            least_certainty=self.draft_min_certainty,
        )

    def _find(self, device: torch.device, dtype: torch.dtype, *, trusts_code: bool) -> ModelFiles:
        given = ModelConfig(model=self.model, revision=self.revision, trust_remote_code=trusts_code)
        return find_model(given, device, dtype)

    def _mapping(self, loaded: LoadedModel, target: TargetView) -> VocabularyMapping | None:
        """None where ids mean the same in both models. Raises: ConfigError."""
        vocabularies = self.target_network(target).tokenizer, loaded.tokenizer, target.vocab_size, loaded.vocab_size
        if self.use_heterogeneous_vocab:
            return map_vocabularies(*vocabularies)
        check_same_vocabulary(*vocabularies)
        if loaded.vocab_size == target.vocab_size:
            return None
        return VocabularyMapping.of_equal_ids(target.vocab_size, loaded.vocab_size)


@contextmanager
def _named() -> Iterator[None]:
    """Let what is wrong with the model say whose model it is."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"model: {error}") from error


class CausalNetwork:
    """A causal language model; implements proposers.network.DraftNetwork.

    Of its output projection only the rows of tokens that the target has are kept: leaving the others out is
    giving them no probability.

    Attributes: loaded: the model.
    """

    def __init__(
        self, loaded: LoadedModel, kv_dtype: torch.dtype, mapping: VocabularyMapping | None, *, runs_plain: bool
    ) -> None:
        """Args:
        mapping: of the target's vocabulary to its own; None where they are the same.
        runs_plain: whether its modules are to stay as they are, neither merged nor packed.
        """
        self.loaded = loaded
        self._kv_dtype = kv_dtype
        self._input_ids: Tensor | None = None
        self._to_target: Tensor | None = None
        self._model = loaded.model
        is_packed = can_pack(self._model.device) and not runs_plain
        if is_packed:
            pack_linears(self._model.base_model)
        elif self._model.device.type == "cuda" and not runs_plain:
            fuse_linears(self._model.base_model)
        self._head = LMHead.of(self._model, loaded.config, is_packed=is_packed)
        if mapping is not None:
            kept = (mapping.to_target >= 0).nonzero()[:, 0]
            self._head = self._head.rows(kept.to(self._model.device))
            self._to_target = mapping.to_target[kept].to(self._model.device)
            self._input_ids = mapping.input_ids.to(self._model.device)

    def trace(self, block_size: int) -> None:
        """Let its decoder layers run compiled, as the target's do. Args: block_size: of its KV to come."""
        shape = self.kv_shape
        kv_shape = 2, shape.num_layers, shape.num_kv_heads, block_size, 2 * shape.head_dim
        kv = torch.zeros(kv_shape, dtype=shape.dtype, device=self._model.device)
        trace_layers(self._model, shape.num_layers, kv)

    @property
    def fingerprint(self) -> str:
        """Of the model, the type of its K and V, and what it is fed."""
        fed = b"" if self._input_ids is None else self._input_ids.cpu().numpy().tobytes()
        return hashlib.sha256(self.loaded.fingerprint + str(self._kv_dtype).encode() + fed).hexdigest()

    @property
    def kv_shape(self) -> KVShape:
        """That of the model, in a type of its own."""
        loaded = self.loaded
        return KVShape(loaded.num_layers, loaded.num_kv_heads, loaded.head_dim, self._kv_dtype)

    @property
    def features(self) -> Features:
        """It reads tokens only."""
        return None

    @property
    def max_num_tokens(self) -> int:
        """Positions the model was made for."""
        return self.loaded.max_position_embeddings

    @property
    def to_target(self) -> Tensor | None:
        """The target's id of each token that it drafts."""
        return self._to_target

    def bind_kv(self, kv: Tensor) -> None:
        """Use this memory for K and V."""
        bind_kv(self._model.base_model, kv)

    def condense(self, features: Tensor) -> Tensor:
        """There is nothing to condense."""
        return features

    def forward(self, token_ids: Tensor, positions: Tensor, step: AttentionStep, hidden: Tensor | None) -> Tensor:
        """The model's last hidden states."""
        if self._input_ids is not None:
            token_ids = self._input_ids[token_ids]
        outputs: Tensor = run_model(self._model.base_model, token_ids, positions, step).last_hidden_state[0]
        return outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own, of the tokens that it drafts."""
        return self._head.logits(hidden)
