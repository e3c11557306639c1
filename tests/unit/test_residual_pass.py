"""Which sums become part of a product, and that it comes to the same."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from server.kernels.skinny_linear import skinny_linear, tile_counts
from server.model.residual_pass import ResidualPass

DTYPE = torch.float16
Returned = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]
"""(residual, product) -> what a layer returns."""


@pytest.mark.parametrize(
    ("returned", "is_merged"),
    [
        pytest.param(lambda residual, product: residual + product, True, id="sum"),
        pytest.param(lambda residual, product: product + residual, True, id="other way round"),
        pytest.param(lambda residual, product: (residual * 2, residual + product), True, id="two results"),
        pytest.param(lambda residual, product: product + product, False, id="twice"),
        pytest.param(lambda residual, product: residual + 2 * product, False, id="scaled"),
        pytest.param(lambda residual, product: (residual + product, product), False, id="product returned too"),
        pytest.param(lambda residual, product: (residual + product).relu(), False, id="not the last"),
        pytest.param(lambda residual, product: residual[:, :1] + product, False, id="broadcast"),
        pytest.param(lambda residual, product: residual.float() + product, False, id="of another type"),
        pytest.param(lambda residual, product: torch.add(residual, product, alpha=2), False, id="alpha"),
        pytest.param(lambda residual, product: product, False, id="no sum"),
    ],
)
def test_what_a_layer_returns(kernel_device: str, returned: Returned, is_merged: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual, weight = (
        torch.randn(*shape, generator=generator).to(kernel_device, DTYPE) for shape in ((3, 40), (3, 24), (24, 40))
    )
    counts = tile_counts(weight)

    def layer(x: Tensor, residual: Tensor, weight: Tensor, counts: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return returned(residual.sigmoid(), skinny_linear(x, weight, None, counts))

    traced = make_fx(layer)(x, residual, weight, counts)
    expected = traced(x, residual, weight, counts)
    num_sums = _count(traced, torch.ops.aten.add.Tensor)
    ResidualPass()(traced.graph)
    traced.graph.lint()
    traced.recompile()
    assert _count(traced, torch.ops.aten.add.Tensor) == num_sums - is_merged
    torch.testing.assert_close(traced(x, residual, weight, counts), expected, rtol=1e-2, atol=1e-2)


def _count(traced: torch.fx.GraphModule, target: object) -> int:
    return sum(node.target is target for node in traced.graph.nodes)
