"""Calls somebody between a model's decoder layers, in forward passes that it asks for."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from server.model.decoder_layers import find_decoder_layers


class LayerHooks:
    """Where to call between the layers of one model; used from the step thread.

    By hooks of the layers, as in taps.py, that are there only while they are wanted: without them, whatever runs in
    the layers' place runs them all in one go.
    """

    def __init__(self, model: nn.Module, num_layers: int) -> None:
        """Args: model: a decoder. To be called while it still has its own list of layers. Raises: LookupError."""
        self._model = model
        self._layers = list(find_decoder_layers(model, num_layers))

    @contextmanager
    def calling(self, before: Callable[[int], None], after: Callable[[int], None]) -> Iterator[None]:
        """In forward passes until the block ends, call in front of each layer and behind it, with its index.

        On a device of its own a layer is queued by then, not done. What they raise ends the pass.
        """

        def enter(index: int, *_: Any) -> None:
            if index > 0:
                after(index - 1)
            before(index)

        def leave(*_: Any) -> None:
            after(len(self._layers) - 1)

        with ExitStack() as hooks:
            for index, layer in enumerate(self._layers):
                handle = layer.register_forward_pre_hook(partial(enter, index), with_kwargs=True)
                hooks.callback(handle.remove)
            hooks.callback(self._model.register_forward_hook(leave).remove)
            yield
