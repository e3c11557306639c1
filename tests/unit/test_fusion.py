"""Packed and merged layers give what the plain ones give, to bfloat16's precision."""

import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from server.compose import build_core
from server.config import Config
from server.model.fusion import MergedLinear, PlainLinear, can_pack, merge_linears, pack_linears
from server.worker.runner import Runner
from tests.tiny_model import build_tiny_model

pytestmark = pytest.mark.skipif(not can_pack(torch.device("cpu")), reason="no C++ compiler")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


class _Attention(nn.Module):
    def __init__(self, *, has_bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, size, bias=has_bias) for size in (96, 32, 32))
        self.o_proj = nn.Linear(96, 64, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = self.q_proj(inputs), self.k_proj(inputs), self.v_proj(inputs)
        outputs: torch.Tensor = self.o_proj(query + torch.cat((key, value, key), -1))
        return outputs


class _Decoder(nn.Module):
    def __init__(self, *, has_bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Attention(has_bias=has_bias) for _ in range(2))
        self.gate_proj = nn.Linear(64, 48, bias=False)
        self.up_proj = nn.Linear(32, 48, bias=False)  # of another input: can not be merged

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        outputs: torch.Tensor = self.gate_proj(inputs) * self.up_proj(inputs[..., :32])
        return outputs


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_decoder_computes_the_same(has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    decoder = _Decoder(has_bias=has_bias).to(dtype).requires_grad_(False)
    inputs = torch.randn(1, 7, 64).to(dtype)
    expected = decoder(inputs)
    pack_linears(decoder)
    assert not any(type(module) is nn.Linear for module in decoder.modules())
    with torch.inference_mode():
        torch.testing.assert_close(decoder(inputs), expected)
        torch.testing.assert_close(decoder(inputs.clone()), expected)


@DTYPES
def test_what_the_operators_do_not_support_stays(dtype: torch.dtype) -> None:
    decoder = nn.Sequential(nn.Linear(5, 3)).to(dtype)
    pack_linears(decoder)
    assert type(decoder[0]) is nn.Linear
    half = nn.Sequential(nn.Linear(4, 3)).half()
    pack_linears(half)
    assert type(half[0]) is nn.Linear


def test_merging_keeps_each_tensor_once() -> None:
    decoder = _Decoder(has_bias=True)
    num_before = sum(tensor.numel() for tensor in decoder.parameters())
    merge_linears(decoder)
    tensors = dict([*decoder.named_parameters(), *decoder.named_buffers()])
    assert sum(tensor.numel() for tensor in tensors.values()) == num_before


def test_plain_weights_go_one_by_one() -> None:
    """Else a model would need twice its memory while it is loaded."""
    decoder = nn.Sequential(_Attention(has_bias=False), _Attention(has_bias=False)).requires_grad_(False)
    plain = [weakref.ref(layer.q_proj.weight) for layer in decoder.children() if isinstance(layer, _Attention)]
    alive = []

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
        alive.append([reference() is not None for reference in plain])
        return PlainLinear(weight, bias)

    merge_linears(decoder, make)
    assert alive == [[True, True], [False, True]]


def test_merged_layers_see_a_new_input() -> None:
    torch.manual_seed(2)
    layers = [nn.Linear(32, 16, bias=False).requires_grad_(False) for _ in range(2)]
    merged = MergedLinear(layers, PlainLinear)
    with torch.inference_mode():
        for _ in range(2):
            inputs = torch.randn(3, 32)
            for index, layer in enumerate(layers):
                torch.testing.assert_close(merged.part(inputs, index), layer(inputs))


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_enforce_eager_leaves_the_model_as_it_is(tmp_path: Path, enforce_eager: bool) -> None:
    folder = build_tiny_model(tmp_path)
    core = build_core(
        Config.from_kwargs(
            model=str(folder), device="cpu", enforce_eager=enforce_eager, kv_cache_memory_bytes="4MiB", compile="none"
        )
    )
    runner = core.steps._executor
    assert isinstance(runner, Runner)
    kinds = {type(module) for module in runner._target._model.modules()}
    assert (nn.Linear in kinds) == enforce_eager
    assert (runner._head.packed is None) == enforce_eager
