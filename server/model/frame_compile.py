"""Compiles what a decoder does in front of its layers and behind them: the frame around them.

Two packages: token ids and positions to the first layer's arguments, and the last layer's hidden states to the
decoder's. A layer that only stands for the others shows the tracer where they begin and end.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from server.model.attention import AttentionStep
from server.model.compiled_model import CompiledFrame
from server.model.decoder_layers import find_parent, layer_tensors
from server.model.fusion import pack_linears
from server.model.layer_call import LayerCall
from server.model.package import NUM_TOKENS, compile_package

_ANY_LENGTH = {1: torch.export.Dim.AUTO}


class _Reached(Exception):
    """The layers begin; carries what the first one is called with."""

    def __init__(self, hidden: Tensor, arguments: dict[str, Any]) -> None:
        super().__init__("the layers begin")
        self.hidden = hidden
        self.arguments = arguments


class _Beginning(nn.Module):
    """Stands for the layers, and ends the pass where they begin."""

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        """Raises: _Reached."""
        raise _Reached(hidden, arguments)


class _Done(nn.Module):
    """Stands for the layers once they are done."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor

    def forward(self, _: Tensor, **__: Any) -> Tensor:
        """What they came to."""
        return self.hidden


class _Before(nn.Module):
    """From token ids and positions to the first layer's hidden states, and what else is made for the layers."""

    def __init__(self, decoder: nn.Module, own_tensors: tuple[str, ...], call: LayerCall, made: Sequence[str]) -> None:
        super().__init__()
        self._decoder = (decoder,)  # in a tuple: its tensors are inputs here, not parameters
        self._own_tensors = own_tensors
        self._call = call
        self._made = made

    def forward(self, token_ids: Tensor, positions: Tensor, own: list[Tensor]) -> list[Tensor]:
        """[1, T] int64 both -> [1, T, hidden] and the others."""
        tensors = dict(zip(self._own_tensors, own, strict=True))
        try:
            functional_call(self._decoder[0], tensors, (), _arguments(token_ids, positions))
        except _Reached as reached:
            found = dict(zip(self._call.tensors, self._call.flatten(reached.arguments), strict=True))
            return [reached.hidden, *(found[name] for name in self._made)]
        raise TypeError("a decoder that calls no layers")


class _After(nn.Module):
    """From the last layer's hidden states to the decoder's."""

    def __init__(self, decoder: nn.Module, own_tensors: tuple[str, ...], layers: _Done) -> None:
        super().__init__()
        self._decoder = (decoder,)
        self._own_tensors = own_tensors
        self._layers = (layers,)

    def forward(self, hidden: Tensor, own: list[Tensor]) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]."""
        self._layers[0].hidden = hidden
        tensors = dict(zip(self._own_tensors, own, strict=True))
        zeros = torch.zeros(hidden.shape[:2], dtype=torch.int64)
        output: Tensor = functional_call(self._decoder[0], tensors, (), _arguments(zeros, zeros)).last_hidden_state
        return output


def compile_frame(
    model: PreTrainedModel, layers: nn.ModuleList, call: LayerCall, made: Sequence[str], folder: Path
) -> CompiledFrame:
    """Leave the packages in a folder.

    Args:
        model: without memory. call: how it calls each of its layers. made: those of the call's tensors that it makes.

    Raises: whatever export or compiler have to say about this architecture.
    """
    decoder, done = model.base_model, _Done()
    with _standing_for(model, layers, _Beginning()):
        decoder.to_empty(device="cpu")
        pack_linears(decoder)
        own = layer_tensors(decoder)
        names, tensors = tuple(own), list(own.values())
        token_ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
        before = _Before(decoder, names, call, made)
        sizes: tuple[Any, ...] = (_ANY_LENGTH, _ANY_LENGTH, [{} for _ in own])
        compile_package(before, (token_ids, token_ids.clone(), tensors), sizes, folder / "before.pt2")
    with _standing_for(model, layers, done):
        hidden = torch.zeros(1, NUM_TOKENS, model.config.hidden_size, dtype=model.dtype)
        after = _After(decoder, names, done)
        compile_package(after, (hidden, tensors), sizes[1:], folder / "after.pt2")
    return CompiledFrame("before.pt2", "after.pt2", tuple(made), names)


@contextmanager
def _standing_for(model: nn.Module, layers: nn.ModuleList, stand_in: nn.Module) -> Iterator[None]:
    parent, name = find_parent(model, layers)
    setattr(parent, name, nn.ModuleList([stand_in]))
    try:
        yield
    finally:
        setattr(parent, name, layers)


def _arguments(token_ids: Tensor, positions: Tensor) -> dict[str, Any]:
    """A decoder's, with a step of which nothing depends."""
    nothing = positions[0]
    step = AttentionStep(nothing, nothing, nothing, nothing, nothing, nothing, nothing[None], groups=())
    return {"input_ids": token_ids, "position_ids": positions, "use_cache": False, "attention_step": step}
