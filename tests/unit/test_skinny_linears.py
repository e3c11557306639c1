"""Which modules are replaced by our kernels for few tokens, and that these compute the same."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from server.model import skinny_linears
from server.model.fusion import PlainLinear
from server.model.skinny_linears import GatedMLP, SkinnyLinear, fuse_linears

DTYPE = torch.float16
"""The interpreter multiplies no bfloat16."""


class _MLP(nn.Module):
    def __init__(self, *, act: nn.Module | None = None, has_bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(32, 48, bias=has_bias) for _ in range(2))
        self.down_proj = nn.Linear(48, 32, bias=has_bias)
        self.act_fn = act or nn.SiLU()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.down_proj(self.act_fn(self.gate_proj(inputs)) * self.up_proj(inputs))
        return outputs


class _ClampedMLP(_MLP):
    """Of the same names, but it computes something else."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.down_proj(self.act_fn(self.gate_proj(inputs)) * self.up_proj(inputs).clamp(max=0.1))
        return outputs


class _ScaledMLP(_MLP):
    """It wants more than tokens."""

    def forward(self, inputs: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        outputs: Tensor = super().forward(inputs) * scale
        return outputs


class _Layer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, size) for size in (32, 16, 16))
        self.o_proj = nn.Linear(32, 32, bias=False)
        self.mlp = mlp

    def forward(self, inputs: Tensor) -> Tensor:
        key_value = torch.cat((self.k_proj(inputs), self.v_proj(inputs)), -1)
        hidden = inputs + self.o_proj(self.q_proj(inputs) + key_value)
        more = (0.5,) if isinstance(self.mlp, _ScaledMLP) else ()
        outputs: Tensor = hidden + self.mlp(hidden, *more)
        return outputs


@pytest.fixture
def _on_any_gpu() -> Iterator[None]:
    with patch.object(skinny_linears, "can_multiply", lambda weight: weight.dtype == DTYPE):
        yield


@pytest.mark.usefixtures("_on_any_gpu")
@pytest.mark.parametrize(
    ("make", "is_fused"),
    [
        (_MLP, True),
        (partial(_MLP, has_bias=True), False),
        (partial(_MLP, act=nn.GELU()), False),
        (_ClampedMLP, False),
        (_ScaledMLP, False),
    ],
    ids=["silu", "bias", "gelu", "clamped", "scaled"],
)
def test_a_fused_decoder_computes_the_same(kernel_device: str, make: Callable[[], nn.Module], is_fused: bool) -> None:
    torch.manual_seed(0)
    decoder = nn.Sequential(_Layer(make())).to(kernel_device, DTYPE).requires_grad_(False)
    inputs = torch.randn(1, 7, 32).to(kernel_device, DTYPE)
    expected = decoder(inputs)
    num_numbers = sum(parameter.numel() for parameter in decoder.parameters())
    fuse_linears(decoder)
    kinds = {type(module) for module in decoder.modules()}
    assert SkinnyLinear in kinds
    assert not kinds & {nn.Linear, PlainLinear}
    assert (GatedMLP in kinds) == is_fused
    with torch.inference_mode():
        torch.testing.assert_close(decoder(inputs), expected, rtol=2e-2, atol=2e-3)
        many = inputs.expand(20, -1, -1)
        torch.testing.assert_close(decoder(many)[3:4], expected, rtol=2e-2, atol=2e-3)
    kept = [tensor for name, tensor in decoder.named_buffers() if not name.endswith("counts")]
    assert sum(tensor.numel() for tensor in kept) == num_numbers


def test_elsewhere_linears_are_merged_only() -> None:
    decoder = nn.Sequential(_Layer(_MLP())).requires_grad_(False)
    inputs = torch.randn(1, 7, 32)
    expected = decoder(inputs)
    fuse_linears(decoder)
    kinds = {type(module) for module in decoder.modules()}
    assert PlainLinear in kinds
    assert not kinds & {SkinnyLinear, GatedMLP}
    torch.testing.assert_close(decoder(inputs), expected)


@pytest.mark.usefixtures("_on_any_gpu")
def test_plain_weights_go_one_by_one(kernel_device: str) -> None:
    decoder = nn.Sequential(_Layer(_MLP()), _Layer(_MLP())).to(kernel_device, DTYPE).requires_grad_(False)
    plain = [weakref.ref(module.gate_proj.weight) for module in decoder.modules() if isinstance(module, _MLP)]
    alive = []

    def fused(gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> GatedMLP:
        alive.append([reference() is not None for reference in plain])
        return GatedMLP(gate, up, down)

    with patch.object(skinny_linears, "GatedMLP", fused):
        fuse_linears(decoder)
    assert alive == [[True, True], [False, True]]
