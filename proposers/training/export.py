"""Writes a trained head as a checkpoint: in the speculators format for EAGLE-3, as vLLM has them for Medusa."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from proposers.base import TargetModel
from proposers.training.eagle_trainee import LM_HEAD, EagleTrainee
from proposers.training.medusa_trainee import MedusaTrainee
from server.errors import ConfigError
from server.version import VERSION

_PROPOSED = 4
"""Drafts that a checkpoint suggests; whoever serves it may ask for others."""


def export_head(
    trainee: EagleTrainee | MedusaTrainee, target: TargetModel, folder: Path, vocab_size: int | None = None
) -> int:
    """Write config.json and model.safetensors, in float16. Returns: bytes of both.

    Args:
        folder: made if missing; what it has under these names is overwritten.
        vocab_size: leave only so many tokens, the most frequent ones; None leaves all.
    Raises: ConfigError if there are fewer.
    """
    known = len(trainee.to_target)
    if vocab_size is not None and vocab_size > known:
        raise ConfigError(f"the head was trained for {known} tokens, so --vocab-size {vocab_size} is too many")
    to_target = trainee.to_target[:vocab_size].cpu()
    if isinstance(trainee, EagleTrainee):
        tensors, config = _eagle(trainee, target, to_target)
    else:
        tensors, config = _medusa(trainee, target, to_target)
    config |= {"target_digest": target.digest, "outrider_version": VERSION}
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    save_file({name: _half(tensor) for name, tensor in tensors.items()}, weights)
    description = folder / "config.json"
    description.write_text(json.dumps(config, indent=2) + "\n")
    return weights.stat().st_size + description.stat().st_size


def _half(tensor: Tensor) -> Tensor:
    return (tensor.half() if tensor.is_floating_point() else tensor).cpu().contiguous()


def _eagle(
    trainee: EagleTrainee, target: TargetModel, to_target: Tensor
) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    size = len(to_target)
    known = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    known[to_target] = True
    tensors = dict(trainee.tensors())
    if LM_HEAD in tensors:
        tensors[LM_HEAD] = tensors[LM_HEAD][:size]
    tensors |= {"d2t": to_target - torch.arange(size), "t2d": known}
    layers = trainee.layers.config.to_diff_dict()
    layers["model_type"] = trainee.layers.config.model_type
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layers,
        "draft_vocab_size": size,
        "target_hidden_size": target.config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(trainee.taps),
        "norm_before_residual": trainee.norms.before_residual,
        "norm_before_fc": trainee.norms.before_fc,
        "fc_norm": trainee.norms.each_tap,
        "norm_output": trainee.norms.of_output,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _PROPOSED}],
            "verifier": {"name_or_path": _name(target), "architectures": target.config.architectures or []},
        },
        "torch_dtype": "float16",
    }
    return tensors, config


def _medusa(
    trainee: MedusaTrainee, target: TargetModel, to_target: Tensor
) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
        "truncated_vocab_size": len(to_target),
        "num_heads": len(trainee.blocks),
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "torch_dtype": "float16",
    }
    return {**trainee.tensors(), "token_map": to_target}, config


def _name(target: TargetModel) -> str:
    return target.folder.name
