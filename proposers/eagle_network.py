"""EAGLE and EAGLE-3 heads as networks that draft."""

import hashlib

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from proposers.base import Head, TargetModel
from proposers.checkpoint import check_names
from proposers.eagle_body import EagleBody, RunsBody, empty_layers
from proposers.eagle_checkpoint import EagleHead
from proposers.eagle_traced import trace_body
from proposers.network import Features, KVShape
from server.errors import ModelError
from server.model.attention import (
    CPU_ATTENTION_NAME,
    OPERATOR_ATTENTION_NAME,
    AttentionStep,
    attention_name,
    bind_kv,
    is_traced,
)
from server.model.fusion import can_pack, pack_linears
from server.model.head import LMHead
from server.model.skinny_linears import fuse_linears

_EMBEDDING = "embed_tokens.weight"
_OUTPUT = "lm_head.weight"


class EagleNetwork:
    """Decoder layers on hidden states of the target; implements proposers.network.DraftNetwork.

    Embedding and output projection are the target's where the head brings none of its own. A pair of token p and
    the hidden state before it has position p here and p - 1 where heads are trained: rotary embeddings see
    distances only.

    Attributes:
        head, target: what it was made of, and for. num_features: size of the features of a token.
        body: all but the output projection. run: what runs in its place, the body itself or compiled code; traced
            code where the target's is.
        is_compilable: whether all that the body calls is an operator that compiled code can call.
        The others: see DraftNetwork.
    """

    def __init__(
        self,
        head: EagleHead,
        target: TargetModel,
        device: torch.device,
        kv_dtype: torch.dtype,
    ) -> None:
        """Args: kv_dtype: of K and V. Raises: ModelError for weights that do not fit."""
        config = head.config
        self.head = head
        self.target = target
        self.hidden_size: int = config.hidden_size
        self.max_num_tokens: int | None = config.max_position_embeddings
        self.features: Features = "last" if head.taps is None else head.taps
        self.num_features: int = target.config.hidden_size * (1 if head.taps is None else len(head.taps))
        self.fingerprint = _fingerprint(head, target, kv_dtype)
        self.to_target = None if head.to_target is None else head.to_target.to(device)
        self.kv_shape = KVShape(config.num_hidden_layers, config.num_key_value_heads, _head_dim(config), kv_dtype)
        self._attention_name = attention_name(device, target.dtype, self.kv_shape.head_dim)
        self._is_traced = is_traced(target.model)
        config._attn_implementation = OPERATOR_ATTENTION_NAME if self._is_traced else self._attention_name
        layers = empty_layers(head, target.config.hidden_size).eval()
        own = _load(head, layers, device, target.dtype)
        is_packed = can_pack(device) and not target.runs_plain
        if is_packed:
            pack_linears(layers)
        elif device.type == "cuda" and not target.runs_plain:
            fuse_linears(layers)
        self.is_compilable = is_packed and config._attn_implementation == CPU_ATTENTION_NAME
        self.body = EagleBody(head, layers, _embedding(head, own.get(_EMBEDDING), target))
        self.run: RunsBody = self.body
        self._traced: RunsBody | None = None
        self._head = _output(head, own.get(_OUTPUT), self.to_target, target, is_packed=is_packed)

    def bind_kv(self, kv: Tensor) -> None:
        """Give its attention the memory for K and V; what is to be traced is traced with the first that it gets."""
        bind_kv(self.body.layers, kv)
        if self._is_traced and self._traced is None:
            self._traced = trace_body(self.body, self.num_features)
            if self._traced is None:
                self._is_traced = False
                self.body.layers.config._attn_implementation = self._attention_name
                bind_kv(self.body.layers, kv)
        self.run = self._traced or self.body

    def condense(self, features: Tensor) -> Tensor:
        """[T, features] -> [T, hidden]."""
        return self.run.condense(features)

    def forward(self, token_ids: Tensor, positions: Tensor, step: AttentionStep, hidden: Tensor | None) -> Tensor:
        """See DraftNetwork."""
        assert hidden is not None, "a network with features is always given hidden states"
        return self.run(hidden, token_ids, step)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocabulary] float32."""
        return self._head.logits(self.run.output(hidden))


def _fingerprint(head: EagleHead, target: TargetModel, kv_dtype: torch.dtype) -> str:
    """Of all that K and V, and the target's hidden states beside them, follow from."""
    digest = hashlib.sha256(f"{target.digest} {target.dtype} {kv_dtype} {head.taps}".encode())
    for name, tensor in sorted(head.tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _head_dim(config: PreTrainedConfig) -> int:
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim


def check_weights(head: EagleHead, target_hidden_size: int) -> None:
    """See that a head has all weights that its configuration calls for, in their shapes, and no others.

    Raises: ModelError.
    """
    _check_names(head, empty_layers(head, target_hidden_size))
    for name in (_EMBEDDING, _OUTPUT):
        if name not in head.tensors:
            _check_shareable(head, name, target_hidden_size)


def _check_names(head: EagleHead, layers: nn.Module) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in layers.state_dict().items()}
    sizes = {_EMBEDDING: head.config.vocab_size, _OUTPUT: head.vocab_size}
    optional = {name: (rows, head.config.hidden_size) for name, rows in sizes.items() if name in head.tensors}
    check_names(head.folder, expected | optional, head.tensors)


def _load(head: EagleHead, layers: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Give the layers their weights. Returns: the others, embedding and output projection, if there are any."""
    _check_names(head, layers)
    placed = {name: tensor.to(device, dtype) for name, tensor in head.tensors.items()}
    layers.load_state_dict({name: placed.pop(name) for name in layers.state_dict()}, assign=True)
    layers.requires_grad_(requires_grad=False)
    return placed


def _embedding(head: EagleHead, own: Tensor | None, target: TargetModel) -> Tensor:
    shared: Tensor = target.model.get_input_embeddings().weight
    if own is None:
        _check_shareable(head, _EMBEDDING, shared.shape[1])
        return shared
    # Many heads bring a copy of the target's.
    return shared if own.shape == shared.shape and torch.equal(own, shared) else own


def _output(
    head: EagleHead, own: Tensor | None, to_target: Tensor | None, target: TargetModel, *, is_packed: bool
) -> Head:
    if own is not None:
        return LMHead.of_weight(own, is_packed=is_packed)
    _check_shareable(head, _OUTPUT, target.head.weight.shape[1])
    return target.head if to_target is None else target.head.rows(to_target)


def _check_shareable(head: EagleHead, name: str, target_size: int) -> None:
    if target_size != head.config.hidden_size:
        raise ModelError(
            f"{head.folder} lacks {name}, and the target's can not take its place: the hidden size is "
            f"{head.config.hidden_size} there and {target_size} here"
        )
