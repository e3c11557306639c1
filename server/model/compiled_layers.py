"""Puts compiled code in the place of a model's decoder layers, once it was seen to compute the same."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from server.errors import ModelError
from server.kernels import cpu_layers
from server.kernels.cpu_layers import LayerRunner
from server.model.cache import cache_root
from server.model.compiled_decoder import CompiledDecoder
from server.model.compiled_model import CompiledModel
from server.model.decoder_layers import find_decoder_layers, find_parent, layer_tensors
from server.model.layer_check import check_frame, check_layers
from server.model.taps import run_between_taps


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
        self.runner = LayerRunner(packages, own)
        self._last: tuple[tuple[Any, ...], list[Tensor]] = ((), [])

    def run(self, begin: int, end: int, hidden: Tensor, **arguments: Any) -> Tensor:
        """What the model's own layers [begin, end) make of hidden states, each called with the same arguments.

        Raises: ValueError for arguments of another kind than those the code was made for.
        """
        return self.runner.run(begin, end, hidden, self._flatten(begin, arguments))

    def _flatten(self, index: int, arguments: Mapping[str, Any]) -> list[Tensor]:
        values = tuple(arguments.values())
        seen, tensors = self._last
        if not _are_same(seen, values):
            tensors = self._calls[index].flatten(arguments)
            self._last = (values, tensors)
        return tensors


class _FirstLayers:
    """Stands for some first layers, or all, in the model's loop; what else that asks, the very first one answers."""

    def __init__(self, layers: Sequence[nn.Module], run: Callable[..., Tensor]) -> None:
        """Args: run: see CompiledLayers.run."""
        self._layers = layers
        self._run = run

    def __call__(self, hidden: Tensor, **arguments: Any) -> Tensor:
        return run_between_taps(self._layers, hidden, partial(self._run, **arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layers[0], name)


class _OneCallList(nn.ModuleList):
    """The model's list of layers, in which a loop over all or the first of them finds one item only."""

    def __init__(self, layers: nn.ModuleList, run: Callable[..., Tensor]) -> None:
        super().__init__(layers)
        self._first = [[_FirstLayers(list(layers)[: count + 1], run)] for count in range(len(layers))]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._first[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            begin, end, stride = index.indices(len(self))
            if begin == 0 < end and stride == 1:
                return self._first[end - 1]
        return super().__getitem__(index)


def install(model: PreTrainedModel, num_layers: int, folder: Path) -> None:
    """Let the model's decoder run the packages in `folder`.

    Called between steps. Writes to block 0 of the KV cache, which belongs to nobody.

    Raises: ModelError if they compute something else than the model's own code, or cannot be loaded; the model
        is then as it was.
    """
    try:
        cpu_layers.load(cache_root() / "kernels")
        layers = find_decoder_layers(model, num_layers)
        made = CompiledModel.read(folder)
        compiled = CompiledLayers(layers, made, folder)

        def run(index: int, hidden: Tensor, /, **arguments: Any) -> Tensor:
            return compiled.run(index, index + 1, hidden, **arguments)

        calls = check_layers(model, layers, run)
        decoder = None
        if made.frame is not None:
            call = made.kinds[0].call
            decoder = CompiledDecoder(model.base_model, layers, compiled.runner, call, made.frame, folder)
            check_frame(model, layers, call, decoder)
    except Exception as error:  # whatever torch, the compiler or the files' contents lead to
        raise ModelError(f"the layers in {folder} cannot be used, delete them to compile anew: {error}") from error
    if all(_are_same(call, calls[-1]) for call in calls):
        setattr(*find_parent(model, layers), _OneCallList(layers, compiled.run))
    else:
        for index, layer in enumerate(layers):
            layer.forward = partial(compiled.run, index, index + 1)
    if decoder is not None:
        model.base_model.forward = decoder.forward


def _are_same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
