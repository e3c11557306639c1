"""Has a decoder's linear layers computed by our kernels for few tokens, on GPUs that these were measured on.

As in fusion.py, modules are found by the names that transformers' models share, and replaced.
"""

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from server.kernels.skinny_linear import can_multiply, skinny_gated_linear, skinny_linear, tile_counts
from server.model.fusion import PlainLinear, merge_linears, replace_linears

NUM_PROBES = 5
_TOLERANCE = 2**-5
"""Of |found - expected| / |expected| on the probes: what lies between is rounded to half precision, or not."""


class SkinnyLinear(nn.Module):
    """A linear layer of weights that `can_multiply`."""

    weight: Tensor
    bias: Tensor | None
    counts: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().contiguous(), persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.register_buffer("counts", tile_counts(weight), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return skinny_linear(inputs, self.weight, self.bias, self.counts)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), whose products by gate and up are one, and with what follows one kernel."""

    gate_up: Tensor

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("gate_up", torch.cat([gate.weight, up.weight]), persistent=False)
        self.down_proj = down

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        outputs: Tensor = self.down_proj(skinny_gated_linear(inputs, self.gate_up))
        return outputs


@torch.no_grad()
def fuse_linears(decoder: nn.Module) -> None:
    """Merge what shares an input into one product, and have few tokens multiplied by our own kernels where they serve.

    For decoders on CUDA. The plain weights are freed.
    """
    places = [  # not the modules there, each of which is to go as soon as another is in its place
        (parent, name)
        for parent in decoder.modules()
        for name, module in parent.named_children()
        if _gated_layers(module) is not None
    ]
    for parent, name in places:
        fused = _fused(parent.get_submodule(name))
        if fused is not None:
            setattr(parent, name, fused)
    merge_linears(decoder, _make)
    replace_linears(decoder, lambda layer: can_multiply(layer.weight), _make)


def _make(weight: Tensor, bias: Tensor | None) -> nn.Module:
    return SkinnyLinear(weight, bias) if can_multiply(weight) else PlainLinear(weight, bias)


def _gated_layers(module: nn.Module) -> list[nn.Linear] | None:
    """gate, up and down, if the names of a module's children say that it may be what a GatedMLP is."""
    names = "gate_proj", "up_proj", "down_proj"
    layers = [layer for name in names if type(layer := getattr(module, name, None)) is nn.Linear]
    if len(layers) != len(names) or not isinstance(getattr(module, "act_fn", None), (nn.SiLU, SiLUActivation)):
        return None
    gate, up, _ = layers
    has_bias = gate.bias is not None or up.bias is not None
    return layers if not has_bias and gate.weight.shape == up.weight.shape and can_multiply(gate.weight) else None


def _fused(module: nn.Module) -> nn.Module | None:
    """The same as a GatedMLP; None if a few tokens show that it computes something else."""
    layers = _gated_layers(module)
    assert layers is not None
    gate, up, down = layers
    probes = torch.randn(1, NUM_PROBES, gate.in_features, generator=torch.Generator().manual_seed(0)).to(gate.weight)
    try:
        expected = module(probes)
    except TypeError:  # it takes more than tokens
        return None
    fused = GatedMLP(gate, up, down)
    found = fused(probes)
    if not isinstance(expected, Tensor) or expected.shape != found.shape:
        return None
    error = (found.float() - expected.float()).norm()
    return fused if bool(error <= _TOLERANCE * expected.float().norm()) else None
