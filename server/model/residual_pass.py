"""A pass over a traced layer: the last sum of the layer becomes part of the product in front of it.

Layers are compiled one by one, so that the compiler finds nothing to fuse the sum of a layer's residual with: it would
be a kernel that reads what the product has just written. Sums inside a layer go with the norms that follow.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

import server.kernels.skinny_linear  # noqa: F401 - it defines the operator

_LINEAR = torch.ops.outrider.skinny_linear.default
_ADD = torch.ops.aten.add.Tensor


class ResidualPass(CustomGraphPass):
    """Makes `residual + skinny_linear(x)` one operator where the layer returns it."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph in place."""
        for returned in graph.output_node().all_input_nodes:
            if returned.target is not _ADD or len(returned.args) != 2 or returned.kwargs:
                continue
            for product, residual in (returned.args, returned.args[::-1]):
                if isinstance(product, fx.Node) and isinstance(residual, fx.Node) and _can_merge(product, residual):
                    _merge(graph, returned, product, residual)
                    break

    def uuid(self) -> Any:
        """By which compiled code is found again."""
        return get_hash_for_files((__file__,))


def _can_merge(product: fx.Node, residual: fx.Node) -> bool:
    if product.target is not _LINEAR or len(product.users) != 1 or product is residual:
        return False
    found, other = product.meta["val"], residual.meta["val"]
    return isinstance(other, Tensor) and found.shape == other.shape and found.dtype == other.dtype


def _merge(graph: fx.Graph, returned: fx.Node, product: fx.Node, residual: fx.Node) -> None:
    with graph.inserting_before(returned):
        merged = graph.call_function(_LINEAR, (*product.args[:4], residual))
    merged.meta.update(returned.meta)
    returned.replace_all_uses_with(merged)
    graph.erase_node(returned)
    graph.erase_node(product)
