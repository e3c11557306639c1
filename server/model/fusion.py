"""Makes a loaded model faster without touching its code: merged projections, packed weights.

Both replace `nn.Linear` modules by others with the same results. What a model looks like is read
from its modules' names, so nothing here knows an architecture.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

PARTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections of one input, by the names that transformers' models share."""


class PackedLinear(nn.Module):
    """A bfloat16 linear layer whose weight lies in oneDNN's own order.

    The plain operator reorders the weight at every call, which for few rows costs as much as the
    product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Args: weight: [out, in] bfloat16 on the CPU; not kept."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
        self._bias = bias

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] -> [..., out], bfloat16."""
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self._bias, "none", [], "")
        return outputs


class MergedLinear:
    """Several linear layers of one input, computed as one; handed out part by part."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        weight = torch.cat([layer.weight for layer in layers])
        biases: list[Tensor] = [layer.bias for layer in layers if _has_bias(layer)]
        bias = torch.cat(biases) if biases else None
        self._linear = PackedLinear(weight, bias)
        self._sizes = [layer.out_features for layer in layers]
        self._inputs: Tensor | None = None
        self._outputs: list[Tensor] = []

    def part(self, inputs: Tensor, index: int) -> Tensor:
        """The output of layer `index`; the first one asked for an input computes them all."""
        if self._inputs is not inputs:
            self._inputs, self._outputs = inputs, list(self._linear(inputs).split(self._sizes, dim=-1))
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

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] -> [..., out] of this part."""
        return self._merged.part(inputs, self._index)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN computes bfloat16 on this CPU."""
    is_bfloat16 = device.type == "cpu" and dtype is torch.bfloat16
    return is_bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@torch.no_grad()
def pack_linears(decoder: nn.Module) -> None:
    """Merge and pack every linear layer of a bfloat16 decoder on the CPU; the plain weights are freed."""
    for parent in list(decoder.modules()):
        for names in PARTS:
            layers = [layer for name in names if type(layer := getattr(parent, name, None)) is nn.Linear]
            if len(layers) == len(names) and _can_merge(layers):
                merged = MergedLinear(layers)
                for index, name in enumerate(names):
                    setattr(parent, name, _Part(merged, index))
        for name, layer in parent.named_children():
            if type(layer) is nn.Linear:
                setattr(parent, name, PackedLinear(layer.weight, layer.bias))


def _can_merge(layers: Sequence[nn.Linear]) -> bool:
    return len({(layer.in_features, _has_bias(layer)) for layer in layers}) == 1


def _has_bias(layer: nn.Linear) -> bool:
    return "bias" in dict(layer.named_parameters())
