"""Compiles a model's decoder layers, one of each kind, in a process of its own, so that serving need not wait.

`python -m server.model.layer_compile ORDER FOLDER`, with a CompileOrder as JSON. It needs no weights: the model
is laid out without memory, and AOTInductor makes a package of one layer of each kind, whose inputs are the
hidden states, the call's tensors and the layer's own tensors.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from server.model import compile_process
from server.model.attention import AttentionStep, bind_kv
from server.model.compiled_model import CompiledFrame, CompiledKind, CompiledModel, CompileOrder
from server.model.decoder_layers import LayerKind, find_decoder_layers, layer_kind, layer_tensors
from server.model.frame_compile import compile_frame
from server.model.fusion import pack_linears
from server.model.layer_call import LayerCall
from server.model.package import NUM_TOKENS, compile_package

NUM_ROWS = 7
NUM_SLOTS = 13
NUM_BLOCKS = 5
"""Further sizes of the example call; see NUM_TOKENS."""


class _Region(nn.Module):
    """A layer as a function of tensors alone."""

    def __init__(self, layer: nn.Module, call: LayerCall, own_tensors: tuple[str, ...]) -> None:
        super().__init__()
        self._layer = (layer,)  # in a tuple: its tensors are inputs here, not parameters
        self._call = call
        self._own_tensors = own_tensors

    def forward(self, hidden: Tensor, shared: list[Tensor], own: list[Tensor]) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]."""
        tensors = dict(zip(self._own_tensors, own, strict=True))
        output: Tensor = functional_call(self._layer[0], tensors, (hidden,), self._call.rebuild(shared))
        return output


def compile_layers(order: CompileOrder, folder: Path) -> None:
    """Fill a folder. Raises: whatever export or compiler have to say about this architecture."""
    compile_process.load_operators(order.num_threads)
    model = _model_without_memory(order)
    layers = find_decoder_layers(model, order.kv_shape[0])
    calls, made = _record_calls(model, layers)
    kinds: dict[LayerKind, CompiledKind] = {}
    kind_of_layer: list[int] = []
    for layer, (call, shared) in zip(layers, calls, strict=True):
        key = (layer_kind(layer), call.tensors, tuple(sorted(call.constants.items(), key=str)))
        if key not in kinds:
            package = f"{len(kinds)}.pt2"
            kinds[key] = _compile_kind(layer, call, shared, model.config.hidden_size, folder / package)
        kind_of_layer.append(list(kinds).index(key))
    is_one_call = len({(call.tensors, tuple(map(id, shared))) for call, shared in calls}) == 1
    frame = _try_frame(model, layers, calls[0][0], made, folder) if is_one_call else None
    CompiledModel(tuple(kinds.values()), tuple(kind_of_layer), frame).write(folder)


def _try_frame(
    model: PreTrainedModel, layers: nn.ModuleList, call: LayerCall, made: Sequence[str], folder: Path
) -> CompiledFrame | None:
    """None for decoders that look at their inputs, say, and so cannot be exported: their layers are what counts."""
    try:
        return compile_frame(model, layers, call, made, folder)
    except OSError:  # a full disk, which another time may have room
        raise
    except Exception as error:  # whatever export or compiler have to say about this architecture
        print(f"only the decoder's layers are compiled: {error}", file=sys.stderr)
        return None


def _model_without_memory(order: CompileOrder) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(order.model_folder, trust_remote_code=order.trusts_code)
    dtype = getattr(torch, order.dtype)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=order.attention, trust_remote_code=order.trusts_code
        )
        bind_kv(model.base_model, torch.empty(NUM_BLOCKS, *order.kv_shape, dtype=getattr(torch, order.kv_dtype)))
    return model.eval().requires_grad_(False)


def _record_calls(
    model: PreTrainedModel, layers: nn.ModuleList
) -> tuple[list[tuple[LayerCall, list[Tensor]]], list[str]]:
    """How the model calls each of its layers, with tensors that have no memory.

    Returns: the calls, and which of the first one's tensors the model makes itself.
    """
    found: list[tuple[LayerCall, list[Tensor]]] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
            raise TypeError("decoder layers that do more than turn hidden states into hidden states")
        call = LayerCall.of(kwargs)
        found.append((call, call.flatten(kwargs)))

    handles = [layer.register_forward_hook(record, with_kwargs=True) for layer in layers]
    with torch.device("meta"), torch.inference_mode():
        tokens, rows = torch.zeros(NUM_TOKENS, dtype=torch.int64), torch.zeros(NUM_ROWS, dtype=torch.int64)
        step = AttentionStep(
            write_blocks=tokens,
            write_offsets=tokens,
            positions=tokens,
            first_token=rows,
            num_query=rows,
            slots=rows,
            block_table=torch.zeros(NUM_SLOTS, NUM_BLOCKS, dtype=torch.int32),
            groups=(),
        )
        positions = tokens[None]
        model.base_model(input_ids=tokens[None], position_ids=positions, use_cache=False, attention_step=step)
    for handle in handles:
        handle.remove()
    first_call, first_shared = found[0]
    made = [
        name
        for name, tensor in zip(first_call.tensors, first_shared, strict=True)
        if not name.startswith("attention_step.") and tensor is not positions
    ]
    return found, made


def _compile_kind(
    layer: nn.Module, call: LayerCall, shared: list[Tensor], hidden_size: int, package: Path
) -> CompiledKind:
    layer.to_empty(device="cpu")
    pack_linears(layer)
    own = layer_tensors(layer)
    hidden = torch.zeros(1, NUM_TOKENS, hidden_size, dtype=next(layer.parameters()).dtype)
    region = _Region(layer, call, tuple(own))
    any_size = torch.export.Dim.AUTO

    def sizes_of_call(name: str, tensor: Tensor) -> dict[int, Any]:
        is_step = name.startswith("attention_step.")
        return {dim: any_size for dim, size in enumerate(tensor.shape) if is_step or size == NUM_TOKENS}

    dynamic_shapes = (
        {1: any_size},
        [sizes_of_call(name, tensor) for name, tensor in zip(call.tensors, shared, strict=True)],
        [{0: any_size} if name.endswith("kv_blocks") else {} for name in own],
    )
    example = (hidden, [torch.zeros_like(tensor, device="cpu") for tensor in shared], list(own.values()))
    compile_package(region, example, dynamic_shapes, package)
    return CompiledKind(package.name, call, tuple(own))


if __name__ == "__main__":
    compile_process.run(lambda order, folder: compile_layers(CompileOrder.from_json(order), folder))
