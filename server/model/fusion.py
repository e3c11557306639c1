"""Makes a loaded model faster without touching its code: merged projections, packed weights.

Both replace `nn.Linear` modules by others with the same results. What a model looks like is read
from its modules' names, so nothing here knows an architecture.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from server.kernels import cpu_linear
from server.kernels.huge_pages import Arena
from server.model.cache import cache_root

PARTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections of one input, by the names that transformers' models share."""

MakeLinear = Callable[[Tensor, Tensor | None], nn.Module]
"""(weight [out, in], bias [out] or None) -> a linear layer."""


class PackedLinear(nn.Module):
    """A linear layer on the CPU whose weight lies in the order of our own operator.

    The plain operator reorders the weight at every call, which for few rows costs as much as the
    product, and adds up in an order that depends on the number of rows.
    """

    packed: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, arena: Arena) -> None:
        """Args: weight: [out, in] on the CPU, of a type and size that the operator supports; not kept."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("packed", arena.copy(cpu_linear.pack(weight.contiguous())), persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        outputs = cpu_linear.linear(inputs.flatten(0, -2), self.packed, self.bias, self.out_features)
        return outputs.view(*inputs.shape[:-1], self.out_features)


class PlainLinear(nn.Module):
    """torch's own linear layer, of given tensors."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return nn.functional.linear(inputs, self.weight, self.bias)


class MergedLinear:
    """Several linear layers of one input, computed as one; handed out part by part."""

    def __init__(self, layers: Sequence[nn.Linear], make: MakeLinear) -> None:
        weight = torch.cat([layer.weight for layer in layers])
        biases: list[Tensor] = [layer.bias for layer in layers if _has_bias(layer)]
        self.linear = make(weight, torch.cat(biases) if biases else None)
        self._sizes = [layer.out_features for layer in layers]
        self._inputs: Tensor | None = None
        self._outputs: list[Tensor] = []

    def part(self, inputs: Tensor, index: int) -> Tensor:
        """The output of layer `index`; the first one asked for an input computes them all."""
        if self._inputs is not inputs:
            self._inputs, self._outputs = inputs, list(self.linear(inputs).split(self._sizes, dim=-1))
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._inputs, self._outputs = None, []  # keep no activations beyond the layer
        return output


class _Part(nn.Module):
    """One of the layers of a MergedLinear, in the place where the model looks for it."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self._merged = merged
        self._index = index
        if index == 0:
            self.linear = merged.linear  # so that its tensors are the model's, once

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] -> [..., out] of this part."""
        return self._merged.part(inputs, self._index)


def can_pack(device: torch.device) -> bool:
    """Whether there are operators for packed weights, which are built here if need be."""
    return device.type == "cpu" and cpu_linear.load(cache_root() / "kernels")


@torch.no_grad()
def merge_linears(decoder: nn.Module, make: MakeLinear = PlainLinear) -> None:
    """Merge what shares an input into one product; the plain weights are freed."""
    for parent in _parents(decoder):
        for names in PARTS:
            layers = [layer for name in names if type(layer := getattr(parent, name, None)) is nn.Linear]
            if len(layers) == len(names) and _can_merge(layers):
                merged = MergedLinear(layers, make)
                for index, name in enumerate(names):
                    setattr(parent, name, _Part(merged, index))


@torch.no_grad()
def pack_linears(decoder: nn.Module) -> None:
    """Merge and pack every linear layer of a decoder on the CPU that the operators support; the rest stays."""
    arena = Arena()

    def make(weight: Tensor, bias: Tensor | None) -> nn.Module:
        is_supported = cpu_linear.supports(weight.dtype, weight.shape[1])
        return PackedLinear(weight, bias, arena) if is_supported else PlainLinear(weight, bias)

    merge_linears(decoder, make)
    replace_linears(decoder, lambda layer: cpu_linear.supports(layer.weight.dtype, layer.in_features), make)


def replace_linears(decoder: nn.Module, is_wanted: Callable[[nn.Linear], bool], make: MakeLinear) -> None:
    """Put others in the place of the linear layers that are left, where they are wanted."""
    for parent in _parents(decoder):
        for name, layer in parent.named_children():
            if type(layer) is nn.Linear and is_wanted(layer):
                setattr(parent, name, make(layer.weight, layer.bias))


def _parents(decoder: nn.Module) -> list[nn.Module]:
    """All modules but linear layers: holding none of those, it lets each go as soon as another is in its place."""
    return [module for module in decoder.modules() if type(module) is not nn.Linear]


def _can_merge(layers: Sequence[nn.Linear]) -> bool:
    return len({(layer.in_features, _has_bias(layer)) for layer in layers}) == 1


def _has_bias(layer: nn.Linear) -> bool:
    return "bias" in dict(layer.named_parameters())
