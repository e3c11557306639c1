"""Medusa heads in the forms they are published in, and what they compute.

Source: Cai et al. 2024, arXiv:2401.10774.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from proposers.base import Head, TargetModel, TargetOutline
from proposers.checkpoint import Checkpoint, check_names, check_size
from server.errors import ModelError
from server.kernels import cpu_linear
from server.kernels.huge_pages import Arena
from server.model.fusion import MakeLinear, PackedLinear, PlainLinear, can_pack
from server.model.head import LMHead

_RENAMED = (
    (re.compile(r"^(medusa_heads?\.)+"), ""),
    (re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$"), r"blocks.\1.layers.\2.\3"),
    (re.compile(r"^(\d+)\.\d+\.weight$"), r"lm_heads.\1.weight"),
)
"""The names of the first publication, to those that vLLM's checkpoints have."""
_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_SHARED_OUTPUT = "lm_head.weight"


class MedusaHeads:
    """K heads on one hidden state, each residual blocks x + SiLU(W x) and an output projection.

    Attributes:
        num_heads: K. vocab_size: of their logits.
        to_target: [vocab] int64, the target's id of each token; None where they are the same.
    """

    def __init__(
        self, blocks: Sequence[Sequence[nn.Module]], outputs: Sequence[Head], to_target: Tensor | None
    ) -> None:
        """Args: blocks: of each head. outputs: of each head, or one for all."""
        self.num_heads = len(blocks)
        self.vocab_size: int = outputs[0].weight.shape[0]
        self.to_target = to_target
        self._blocks = blocks
        self._outputs = outputs

    def logits(self, hidden: Tensor, num_heads: int) -> Tensor:
        """Of the first heads: [R, hidden] -> [R, num_heads, vocab] float32."""
        states = torch.stack([self._transformed(hidden, layers) for layers in self._blocks[:num_heads]], dim=1)
        if len(self._outputs) == 1:
            return self._outputs[0].logits(states)
        outputs = self._outputs[:num_heads]
        return torch.stack([output.logits(states[:, index]) for index, output in enumerate(outputs)], dim=1)

    @staticmethod
    def _transformed(hidden: Tensor, layers: Sequence[nn.Module]) -> Tensor:
        for layer in layers:
            hidden = hidden + functional.silu(layer(hidden))
        return hidden


@dataclass(frozen=True, slots=True)
class MedusaWeights:
    """Heads that fit their target.

    Attributes:
        tensors: by vLLM's names. outputs: those of the output projections: of each head, one for all, or none.
        num_layers: blocks of each head.
        to_target: [their vocabulary] int64, the target's id of each token; None where they are the same.
    """

    tensors: Mapping[str, Tensor]
    outputs: Sequence[str]
    num_heads: int
    num_layers: int
    to_target: Tensor | None


def medusa_weights(checkpoint: Checkpoint, target: TargetModel | TargetOutline) -> MedusaWeights:
    """Understand a checkpoint. As many heads are taken as it has weights of, whatever its configuration says.

    Without an output projection of its own it takes the target's; with a token_map only the tokens in it.
    Raises: ModelError.
    """
    folder, config = checkpoint.folder, checkpoint.config
    tensors = {_canonical(name): tensor for name, tensor in checkpoint.tensors.items()}
    hidden_size, vocab_size = target.config.hidden_size, target.config.vocab_size
    check_size(folder, "hidden size", config.get("hidden_size", hidden_size), hidden_size)
    check_size(folder, "vocabulary", config.get("vocab_size", vocab_size), vocab_size)
    known = tensors.pop("token_map", None)
    to_target = None if known is None else _checked_map(checkpoint, known, vocab_size)
    places = [tuple(map(int, match.groups()[:2])) for match in map(_BLOCK.match, tensors) if match]
    if not places:
        raise ModelError(f"{folder} has no Medusa heads: its weights are called {', '.join(sorted(tensors)[:3])}")
    num_heads, num_layers = (1 + max(numbers) for numbers in zip(*places, strict=True))
    outputs = _output_names(tensors, num_heads, is_shared=bool(config.get("original_lm_head")))
    expected: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"blocks.{head}.layers.{layer}"
            expected[f"{name}.weight"] = (hidden_size, hidden_size)
            if f"{name}.bias" in tensors:
                expected[f"{name}.bias"] = (hidden_size,)
    if to_target is not None:
        tensors |= {name: tensors[name][to_target] for name in outputs if len(tensors[name]) == vocab_size}
    rows = vocab_size if to_target is None else len(to_target)
    check_names(folder, expected | dict.fromkeys(outputs, (rows, hidden_size)), tensors)
    return MedusaWeights(tensors, outputs, num_heads, num_layers, to_target)


def medusa_heads(checkpoint: Checkpoint, target: TargetModel, device: torch.device) -> MedusaHeads:
    """Load a checkpoint, see medusa_weights. Raises: ModelError."""
    weights = medusa_weights(checkpoint, target)
    is_packed = can_pack(device) and not target.runs_plain
    placed = {name: tensor.to(device, target.dtype) for name, tensor in weights.tensors.items()}
    to_target = None if weights.to_target is None else weights.to_target.to(device)
    make = _linear_maker(is_packed=is_packed)
    blocks = [_block(placed, head, weights.num_layers, make) for head in range(weights.num_heads)]
    projections: list[Head] = [LMHead.of_weight(placed[name], is_packed=is_packed) for name in weights.outputs]
    return MedusaHeads(blocks, projections or [_target_output(target, to_target)], to_target)


def _canonical(name: str) -> str:
    for pattern, new in _RENAMED:
        name = pattern.sub(new, name)
    return name


def _checked_map(checkpoint: Checkpoint, token_map: Tensor, vocab_size: int) -> Tensor:
    ids = token_map.long()
    size = checkpoint.config.get("truncated_vocab_size", len(ids))
    if tuple(ids.shape) != (size,):
        raise ModelError(
            f"{checkpoint.folder}: token_map has the shape {list(ids.shape)}, and truncated_vocab_size is {size}"
        )
    if len(ids.unique()) < len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ModelError(f"{checkpoint.folder}: token_map has ids twice, or out of the vocabulary of {vocab_size}")
    return ids


def _output_names(tensors: dict[str, Tensor], num_heads: int, *, is_shared: bool) -> list[str]:
    """Of the output projections there are to be: one for each head, one for all, or none."""
    if is_shared and _SHARED_OUTPUT not in tensors and "lm_heads.0.weight" in tensors:
        tensors[_SHARED_OUTPUT] = tensors["lm_heads.0.weight"]
        for head in range(num_heads):
            tensors.pop(f"lm_heads.{head}.weight", None)
    if _SHARED_OUTPUT in tensors:
        return [_SHARED_OUTPUT]
    has_own = any(name.startswith("lm_heads.") for name in tensors)
    return [f"lm_heads.{head}.weight" for head in range(num_heads)] if has_own else []


def _linear_maker(*, is_packed: bool) -> MakeLinear:
    arena = Arena()

    def make(weight: Tensor, bias: Tensor | None) -> nn.Module:
        is_supported = is_packed and cpu_linear.supports(weight.dtype, weight.shape[1])
        return PackedLinear(weight, bias, arena) if is_supported else PlainLinear(weight, bias)

    return make


def _block(tensors: Mapping[str, Tensor], head: int, num_layers: int, make: MakeLinear) -> list[nn.Module]:
    names = [f"blocks.{head}.layers.{layer}" for layer in range(num_layers)]
    return [make(tensors[f"{name}.weight"], tensors.get(f"{name}.bias")) for name in names]


def _target_output(target: TargetModel, to_target: Tensor | None) -> Head:
    return target.head if to_target is None else target.head.rows(to_target)
