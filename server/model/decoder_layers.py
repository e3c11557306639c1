"""Finds a model's decoder layers, and tells which of them are of one kind."""

from collections.abc import Iterator

from torch import Tensor, nn

LayerKind = tuple[object, ...]
"""Equal for layers that compute the same function of their inputs and tensors."""


def find_decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The list in which a model keeps its decoder layers.

    Raises: LookupError if there is no such list.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            indices = [next(_layer_indices(layer), None) for layer in module]
            if indices == list(range(num_layers)):
                return module
    raise LookupError(f"the model has no list of {num_layers} decoder layers")


def find_parent(model: nn.Module, layers: nn.ModuleList) -> tuple[nn.Module, str]:
    """The module that holds a list of layers, and under which name."""
    return next(
        (module, name) for module in model.modules() for name, child in module.named_children() if child is layers
    )


def layer_kind(layer: nn.Module) -> LayerKind:
    """What two layers must agree on to share code: modules, shapes, and settings that are plain values."""
    kind: list[object] = []
    for path, module in layer.named_modules():
        settings = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, type(None))) and name != "layer_idx"
        }
        kind.append((path, type(module), tuple(sorted(settings.items(), key=lambda item: item[0]))))
    kind += [(name, tensor.shape, tensor.dtype) for name, tensor in layer_tensors(layer).items()]
    return tuple(kind)


def layer_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """A layer's parameters and buffers by name, each once."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _layer_indices(layer: nn.Module) -> Iterator[int]:
    for module in layer.modules():
        if isinstance(index := getattr(module, "layer_idx", None), int):
            yield index
