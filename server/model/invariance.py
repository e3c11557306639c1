"""What `--batch-invariant` does to a model: a token's bits do not depend on the tokens beside it.

Libraries choose a kernel, and with it an order of summation, by the number of rows. On CUDA, what sums over a
row in a model's own code is redirected to kernels whose order is fixed, as the model runs; attention takes
spans of positions of a fixed length. On the CPU our C++ operators are like that anyway.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from server.errors import ConfigError, ModelError
from server.kernels.invariant_linear import invariant_linear
from server.kernels.invariant_mean import invariant_mean
from server.model.attention import CPU_ATTENTION_NAME, CUDA_ATTENTION_NAME, INVARIANT_ATTENTION_NAME


def make_invariant(model: PreTrainedModel, *, is_packed: bool) -> None:
    """Have a model run so from now on; see `run_model`.

    Args: is_packed: whether its linear layers are our C++ operators.
    Raises: ConfigError where there are no such kernels.
    """
    attention = model.config._attn_implementation
    if attention == CUDA_ATTENTION_NAME:
        model.config._attn_implementation = INVARIANT_ATTENTION_NAME
    elif attention != CPU_ATTENTION_NAME or not is_packed:
        raise ConfigError(
            "batch_invariant needs our own kernels: a CUDA device with Triton, or on the CPU a C++ compiler, bfloat16 "
            "or float32, and no --enforce-eager"
        )


class Invariant(TorchFunctionMode):
    """Redirects what a model's code calls while it is entered."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Raises: ModelError for a product whose order of summation is not ours to fix."""
        if function in _PRODUCTS and args[0].shape[-1] > 1:
            raise ModelError(
                f"--batch-invariant does not know this architecture: it calls {function.__name__} in a layer"
            )
        return _REDIRECTED.get(function, function)(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's name
    output: Tensor = invariant_linear(input, weight, bias)
    return output


def _mean(input: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:  # noqa: A002 - as above
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    if options or dims not in ((-1,), (input.dim() - 1,)):
        return torch.mean(input, dim, keepdim, **options)
    mean: Tensor = invariant_mean(input.contiguous())
    return mean if keepdim else mean.squeeze(-1)


_REDIRECTED: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.linear: _linear,
    torch.mean: _mean,
    Tensor.mean: _mean,
}
_PRODUCTS = {
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    Tensor.bmm,
    torch.mm,
    Tensor.mm,
    torch.baddbmm,
    torch.addmm,
    torch.einsum,
}
"""Over one number only they sum nothing."""
