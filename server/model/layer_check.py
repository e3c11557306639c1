"""Compares other code for a model's decoder layers with the model's own."""

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from server.model.attention import AttentionGroup, AttentionStep
from server.model.forward import run_model

CHECK_LEN = 5
_TOLERANCE = {torch.bfloat16: 2**-5, torch.float16: 2**-8, torch.float32: 1e-4}
"""Relative to the largest number that a layer takes in or puts out; fused code rounds less often than the model's."""


class RunLayer(Protocol):
    """Other code for layer `index`, called with the arguments of the model's own."""

    def __call__(self, index: int, hidden: Tensor, /, **arguments: Any) -> Tensor: ...


@torch.inference_mode()
def check_layers(model: PreTrainedModel, layers: nn.ModuleList, run: RunLayer) -> list[tuple[Any, ...]]:
    """Compare the outputs on a prompt and on a single token; writes to block 0 of the KV cache.

    Returns: the arguments of each layer's last call, without the hidden states.
    Raises: ValueError where they differ.
    """
    calls: list[tuple[Any, ...]] = []

    def compare(index: int, _: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any], expected: Tensor) -> None:
        found = run(index, args[0], **kwargs)
        largest = torch.maximum(args[0].abs().amax(), expected.abs().amax())
        if not ((found - expected).abs().amax() <= _TOLERANCE[expected.dtype] * largest):
            raise ValueError(f"layer {index} computes something else than the model's own")
        calls.append(tuple(kwargs.values()))

    handles = [layer.register_forward_hook(partial(compare, i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        for length in (CHECK_LEN, 1):
            run_prompt(model, length)
    finally:
        for handle in handles:
            handle.remove()
    if len(calls) != 2 * len(layers):
        raise ValueError(f"the model called {len(calls)} layers of {2 * len(layers)}")
    return calls[-len(layers) :]


def run_prompt(model: PreTrainedModel, length: int) -> None:
    """Run a model's decoder over so many tokens, with their K and V in block 0, which belongs to nobody."""
    device = next(model.parameters()).device
    positions, zeros = torch.arange(length, device=device), torch.zeros(length, dtype=torch.int64, device=device)
    zero = zeros[:1]
    step = AttentionStep(
        write_blocks=zeros,
        write_offsets=positions,
        positions=positions,
        first_token=zero,
        num_query=zero + length,
        slots=zero,
        block_table=zero[None],
        groups=(AttentionGroup(0, 1, 0, length, length),),
    )
    run_model(model.base_model, positions + 1, positions, step)
