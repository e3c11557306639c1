"""Keeps hidden states on their way through a model's decoder layers."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from server.errors import ConfigError
from server.model.decoder_layers import find_decoder_layers


class LayerTaps:
    """What goes into some decoder layers, in the last forward pass; used from the step thread.

    By hooks of the layers, which whatever runs in their place calls as well, see `call_taps`. They go with this object.
    """

    def __init__(self, model: nn.Module, num_layers: int, indices: Iterable[int]) -> None:
        """Args: indices: of the layers, each below num_layers. Raises: ConfigError for another."""
        self._taken: dict[int, Tensor] = {}
        wanted = sorted(set(indices))
        if not wanted:
            return
        layers = find_decoder_layers(model, num_layers)
        for index in wanted:
            if not 0 <= index < num_layers:
                raise ConfigError(f"hidden states of layer {index} are asked for; the target has {num_layers} layers")
            hook = partial(_keep, self._taken, index)
            handle = layers[index].register_forward_pre_hook(hook, with_kwargs=True)
            weakref.finalize(self, handle.remove)

    def take(self) -> Mapping[int, Tensor]:
        """[T, hidden] by layer, of the last forward pass."""
        taken = dict(self._taken)
        self._taken.clear()
        return taken


def _keep(
    taken: dict[int, Tensor], index: int, _: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any]
) -> None:
    hidden: Tensor = inputs[0] if inputs else options["hidden_states"]
    taken[index] = hidden.flatten(0, -2)


def has_taps(layer: nn.Module) -> bool:
    """Whether somebody wants to see what goes into a layer."""
    return bool(layer._forward_pre_hooks)


def call_taps(layer: nn.Module, hidden: Tensor) -> None:
    """Show hidden states to those who want to see what goes into a layer that is not called itself."""
    for hook in layer._forward_pre_hooks.values():
        hook(layer, (hidden,), {})  # all of ours take the keyword arguments, too


def run_between_taps(layers: Sequence[nn.Module], hidden: Tensor, run: Callable[[int, int, Tensor], Tensor]) -> Tensor:
    """Run layers that are not called themselves, in as few goes as those allow who want to see what is between them.

    Args: run: (begin, end, hidden states) -> what layers [begin, end) make of them.
    """
    begin = 0
    for index, layer in enumerate(layers):
        if has_taps(layer):
            if begin < index:
                hidden, begin = run(begin, index, hidden), index
            call_taps(layer, hidden)
    return run(begin, len(layers), hidden)
