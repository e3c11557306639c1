"""Compares other code for a model's decoder with the model's own."""

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from server.model.attention import AttentionGroup, AttentionStep
from server.model.forward import run_model
from server.model.layer_call import LayerCall

CHECK_LEN = 5
_TOLERANCE = {torch.bfloat16: 2**-5, torch.float16: 2**-8, torch.float32: 1e-4}
"""Relative to the largest number that a layer takes in or puts out; fused code rounds less often than the model's."""


class RunLayer(Protocol):
    """Other code for layer `index`, called with the arguments of the model's own."""

    def __call__(self, index: int, hidden: Tensor, /, **arguments: Any) -> Tensor: ...


class Frame(Protocol):
    """Other code for what a decoder does in front of its layers and behind them; see CompiledDecoder."""

    def before(self, token_ids: Tensor, positions: Tensor, step: AttentionStep) -> tuple[Tensor, list[Tensor]]: ...

    def after(self, hidden: Tensor) -> Tensor: ...


@torch.inference_mode()
def check_layers(model: PreTrainedModel, layers: nn.ModuleList, run: RunLayer) -> list[tuple[Any, ...]]:
    """Compare the outputs on a prompt and on a single token; writes to block 0 of the KV cache.

    Returns: the arguments of each layer's last call, without the hidden states.
    Raises: ValueError where they differ.
    """
    calls: list[tuple[Any, ...]] = []

    def compare(index: int, _: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any], expected: Tensor) -> None:
        compare_outputs(f"layer {index}", run(index, args[0], **kwargs), expected, args[0])
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


@torch.inference_mode()
def check_frame(model: PreTrainedModel, layers: nn.ModuleList, call: LayerCall, frame: Frame) -> None:
    """The same for what lies in front of the layers and behind them, on a prompt.

    Raises: ValueError where they differ.
    """
    given: dict[str, Any] = {}
    last: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> None:
        hidden, shared = frame.before(given["input_ids"], given["position_ids"], given["attention_step"])
        compare_outputs("what lies in front of the layers", hidden, args[0], args[0])
        for name, found, expected in zip(call.tensors, shared, call.flatten(kwargs), strict=True):
            compare_outputs(f"{name} of the layers", found, expected, expected)

    def after(_: nn.Module, __: object, output: Any) -> None:
        compare_outputs("what lies behind the layers", frame.after(last[0]), output.last_hidden_state, last[0])

    decoder = model.base_model
    handles = [
        decoder.register_forward_pre_hook(lambda _, __, kwargs: given.update(kwargs), with_kwargs=True),
        layers[0].register_forward_pre_hook(before, with_kwargs=True),
        layers[-1].register_forward_hook(lambda _, __, output: last.append(output)),
        decoder.register_forward_hook(after),
    ]
    try:
        run_prompt(model, CHECK_LEN)
    finally:
        for handle in handles:
            handle.remove()


def compare_outputs(what: str, found: Tensor, expected: Tensor, given: Tensor) -> None:
    """Args: given: what it was computed from. Raises: ValueError where they differ."""
    if expected.is_floating_point():
        largest = torch.maximum(given.abs().amax(), expected.abs().amax())
        is_same = bool((found - expected).abs().amax() <= _TOLERANCE[expected.dtype] * largest)
    else:
        is_same = torch.equal(found, expected)
    if not is_same:
        raise ValueError(f"{what}: the compiled code computes something else than the model's own")


def run_prompt(model: PreTrainedModel, length: int) -> None:
    """Run a model's decoder over so many tokens, with their K and V in block 0, which belongs to nobody."""
    step = prompt_step(length, next(model.parameters()).device)
    run_model(model.base_model, step.positions + 1, step.positions, step)


def prompt_step(length: int, device: torch.device) -> AttentionStep:
    """One row of so many tokens in block 0."""
    positions, zeros = torch.arange(length, device=device), torch.zeros(length, dtype=torch.int64, device=device)
    zero = zeros[:1]
    return AttentionStep(
        write_blocks=zeros,
        write_offsets=positions,
        positions=positions,
        first_token=zero,
        num_query=zero + length,
        slots=zero,
        block_table=zero[None].int(),
        groups=(AttentionGroup(0, 1, 0, length, length),),
    )
