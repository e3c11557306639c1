"""How torch.compile traces a model's code in this process."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.experimental._config as shapes_config

from server.model.residual_pass import ResidualPass

OPTIONS: dict[str, Any] = {"post_grad_custom_post_pass": ResidualPass()}
"""For the compiler."""
MAX_VERSIONS = 6
"""Of a function's code, two for each kind of layer. torch gives up at 8, with an error that must not meet a step."""


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one graph, for tensors of any size; traced when it is called first, inside `tracing`."""
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=True, options=OPTIONS)
    return compiled


@contextmanager
def tracing() -> Iterator[None]:
    """Where functions are called for the first time, with one token and with several."""
    # A number of the model is a constant to it, not an input as torch would have it.
    limits = torch._dynamo.config.patch(specialize_float=True, recompile_limit=MAX_VERSIONS)
    # Two sizes that are equal here, as of blocks and of heads, need not be later.
    distinct = shapes_config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with warnings.catch_warnings(), limits, distinct:
        warnings.simplefilter("ignore")  # advice on the compiler's settings
        yield
