"""EAGLE and EAGLE-3 heads in every form that they are published in, brought to one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from proposers.base import TargetModel, TargetOutline
from proposers.checkpoint import Checkpoint, check_size
from proposers.decoder_kinds import layer_config
from server.errors import ModelError

Kind = Literal["eagle", "eagle3"]

_RENAMED = (("model.", ""), ("midlayer.", "layers.0."), ("fusion_fc.", "fc."), ("transformer.", "layers.0."))
"""Beginnings of names: of a whole model's export, EAGLE-3's own, and two of EAGLE in the speculators format."""
_LEFT_OUT = ("verifier_", "t2d")
"""What training needed, and what follows from d2t."""
_EAGLE3_MARK = "layers.0.hidden_norm.weight"


@dataclass(frozen=True, slots=True)
class Norms:
    """Where an EAGLE-3 head normalises besides in its layers.

    Attributes:
        before_fc: all features at a time. each_tap: the features of each layer for themselves.
        before_residual: what goes around the first attention is normalised, too.
        of_output: the hidden state that is fed back is the normalised one.
    """

    before_fc: bool = False
    each_tap: bool = False
    before_residual: bool = False
    of_output: bool = False


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A head that fits its target.

    Attributes:
        kind: what its layers are like. config: of them.
        tensors: by one set of names, see eagle_layers.py; own embedding and output projection among them if there are
            any.
        to_target: [its vocabulary] int64, the target's id of each token; None where they are the same.
        taps: layers of the target whose inputs it takes; None for the last hidden state.
    """

    folder: Path
    kind: Kind
    config: PreTrainedConfig
    tensors: Mapping[str, Tensor]
    to_target: Tensor | None
    taps: tuple[int, ...] | None
    norms: Norms

    @property
    def vocab_size(self) -> int:
        """Tokens that it can draft."""
        return self.config.vocab_size if self.to_target is None else len(self.to_target)


def eagle_head(checkpoint: Checkpoint, target: TargetModel | TargetOutline, kind: Kind) -> EagleHead:
    """Understand a checkpoint. Raises: ModelError if it is of another kind, or was made for another target."""
    folder, config = checkpoint.folder, checkpoint.config
    tensors = {_canonical(name): tensor for name, tensor in checkpoint.tensors.items()}
    _check_kind(folder, config, tensors, kind)
    layers = layer_config(folder, config.get("transformer_layer_config") or config.get("model") or config)
    check_size(folder, "vocabulary", layers.vocab_size, target.config.vocab_size)
    hidden_size = config.get("target_hidden_size") or layers.hidden_size
    check_size(folder, "hidden size", hidden_size, target.config.hidden_size)
    to_target = _to_target(folder, config, tensors, layers.vocab_size)
    return EagleHead(
        folder=folder,
        kind=kind,
        config=layers,
        tensors={name: tensor for name, tensor in tensors.items() if not _is_left_out(name)},
        to_target=to_target,
        taps=_taps(folder, config, target.config.num_hidden_layers) if kind == "eagle3" else None,
        norms=_norms(config) if kind == "eagle3" else Norms(),
    )


def _canonical(name: str) -> str:
    for old, new in _RENAMED:
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return name


def _is_left_out(name: str) -> bool:
    return name == "d2t" or name.startswith(_LEFT_OUT) or name.endswith("rotary_emb.inv_freq")


def _check_kind(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], kind: str) -> None:
    found = config.get("speculators_model_type", "eagle3" if _EAGLE3_MARK in tensors else "eagle")
    if found != kind:
        raise ModelError(f"{folder} holds a head of the kind {found}, and the method is {kind}")
    if kind == "eagle" and config.get("layernorms"):
        raise ModelError(f"{folder} has layernorms, whose place is not the same in all that read such heads")


def _norms(config: Mapping[str, Any]) -> Norms:
    nested = config.get("eagle_config") or {}

    def is_set(name: str) -> bool:
        return bool(nested.get(name, config.get(name, False)))

    return Norms(
        before_fc=is_set("norm_before_fc"),
        each_tap=is_set("fc_norm"),
        before_residual=is_set("norm_before_residual"),
        of_output=is_set("norm_output"),
    )


def _taps(folder: Path, config: Mapping[str, Any], num_layers: int) -> tuple[int, ...] | None:
    nested = config.get("eagle_config") or {}
    if not nested.get("use_aux_hidden_state", True):
        return None
    if given := config.get("eagle_aux_hidden_state_layer_ids"):
        taps = tuple(given)
    elif given := nested.get("eagle_aux_hidden_state_layer_ids"):
        # Those who write it there count outputs of layers, others inputs.
        taps = tuple([index + 1 for index in given])
    else:
        taps = (2, num_layers // 2, num_layers - 3)
    if not all(isinstance(index, int) and 0 <= index < num_layers for index in taps):
        raise ModelError(
            f"{folder} wants the hidden states in front of the layers {list(taps)} of its target, which has "
            f"{num_layers}; set eagle_aux_hidden_state_layer_ids in its config.json"
        )
    return taps


def _to_target(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], vocab_size: int
) -> Tensor | None:
    """From d2t, which has for each token of the reduced vocabulary how far its id is from the target's."""
    size = config.get("draft_vocab_size")
    if "d2t" not in tensors:
        if size not in (None, vocab_size):
            raise ModelError(f"{folder} lacks d2t, without which its {size} tokens are not known among {vocab_size}")
        return None
    offsets = tensors["d2t"].long()
    size = size or len(offsets)
    if tuple(offsets.shape) != (size,):
        raise ModelError(f"{folder}: d2t has the shape {list(offsets.shape)}, and draft_vocab_size is {size}")
    to_target = torch.arange(size) + offsets
    if len(to_target.unique()) < size or int(to_target.min()) < 0 or int(to_target.max()) >= vocab_size:
        raise ModelError(f"{folder}: d2t leads to ids twice, or out of the vocabulary of {vocab_size}")
    known = tensors.get("t2d")
    if known is not None and not torch.equal(known.bool().nonzero()[:, 0], to_target.sort().values):
        raise ModelError(f"{folder}: t2d and d2t contradict each other")
    return None if torch.equal(to_target, torch.arange(vocab_size)) else to_target
