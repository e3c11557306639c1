"""Puts compiled code in the place of a model's decoder layers, once it was seen to compute the same."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from server.errors import ModelError
from server.kernels import cpu_layers
from server.kernels.cpu_layers import LayerRunner
from server.model.attention import AttentionGroup, AttentionStep
from server.model.cache import cache_root
from server.model.compiled_model import CompiledModel
from server.model.decoder_layers import find_decoder_layers, layer_tensors

CHECK_LEN = 5
_TOLERANCE = {torch.bfloat16: 2**-5, torch.float16: 2**-8, torch.float32: 1e-4}
"""Relative to the largest number that a layer takes in or puts out; fused code rounds less often than the model's."""


class CompiledLayers:
    """The layers of one model as compiled code; used from the step thread only."""

    def __init__(self, layers: nn.ModuleList, compiled: CompiledModel, folder: Path) -> None:
        """Raises: ValueError if the code was made for other layers."""
        self._calls = [compiled.kinds[kind].call for kind in compiled.kind_of_layer]
        own: list[list[Tensor]] = []
        for layer, kind in zip(layers, compiled.kind_of_layer, strict=True):
            tensors = layer_tensors(layer)
            if tuple(tensors) != compiled.kinds[kind].own_tensors:
                raise ValueError(f"a layer has the tensors {list(tensors)}, not {compiled.kinds[kind].own_tensors}")
            own.append(list(tensors.values()))
        packages = [folder / compiled.kinds[kind].package for kind in compiled.kind_of_layer]
        self._runner = LayerRunner(packages, own)
        self._last: tuple[tuple[Any, ...], list[Tensor]] = ((), [])

    def run(self, index: int, hidden: Tensor, **arguments: Any) -> Tensor:
        """What the model's own layer `index` returns for the same arguments.

        Raises: ValueError for arguments of another kind than those the code was made for.
        """
        return self._runner.run(index, hidden, self._flatten(index, arguments))

    def _flatten(self, index: int, arguments: Mapping[str, Any]) -> list[Tensor]:
        values = tuple(arguments.values())
        seen, tensors = self._last
        # All layers, or all of one kind, are called with the same objects.
        if len(seen) != len(values) or any(a is not b for a, b in zip(seen, values, strict=True)):
            tensors = self._calls[index].flatten(arguments)
            self._last = (values, tensors)
        return tensors


def install(model: PreTrainedModel, num_layers: int, folder: Path) -> None:
    """Let the model's decoder layers run the packages in `folder`.

    Called between steps. Writes to block 0 of the KV cache, which belongs to nobody.

    Raises: ModelError if they compute something else than the model's own code, or cannot be loaded; the model
        is then as it was.
    """
    try:
        cpu_layers.load(cache_root() / "kernels")
        layers = find_decoder_layers(model, num_layers)
        compiled = CompiledLayers(layers, CompiledModel.read(folder), folder)
        _check(model, layers, compiled)
    except Exception as error:  # whatever torch, the compiler or the files' contents lead to
        raise ModelError(f"the compiled layers in {folder} cannot be used: {error}") from error
    for index, layer in enumerate(layers):
        layer.forward = partial(compiled.run, index)


@torch.inference_mode()
def _check(model: PreTrainedModel, layers: nn.ModuleList, compiled: CompiledLayers) -> None:
    """Compare each layer's output on a prompt of the model's own; ValueError where it differs."""
    num_found = 0

    def compare(index: int, _: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any], expected: Tensor) -> None:
        nonlocal num_found
        found = compiled.run(index, args[0], **kwargs)
        largest = torch.maximum(args[0].abs().amax(), expected.abs().amax())
        if not ((found - expected).abs().amax() <= _TOLERANCE[expected.dtype] * largest):
            raise ValueError(f"layer {index} computes something else than the model's own")
        num_found += 1

    handles = [layer.register_forward_hook(partial(compare, i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        for length in (CHECK_LEN, 1):
            model.base_model(**_prompt(length))
    finally:
        for handle in handles:
            handle.remove()
    if num_found != 2 * len(layers):
        raise ValueError(f"the model called {num_found} layers of {2 * len(layers)}")


def _prompt(length: int) -> dict[str, Any]:
    positions, zeros, zero = (
        torch.arange(length),
        torch.zeros(length, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
    )
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
    return {
        "input_ids": positions[None] + 1,
        "position_ids": positions[None],
        "use_cache": False,
        "attention_step": step,
    }
