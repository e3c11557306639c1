"""Decoder layers that are traced in this process, on the CPU with plain tensors: as on CUDA but for the kernels."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from proposers.layer_skip import LayerSkipConfig
from server.kernels import cpu_attention
from server.model.attention import bind_kv
from server.model.layer_hooks import LayerHooks
from server.model.traced_layers import trace_layers
from tests.fakes.stepping import Stepping
from tests.fakes.tracing import nothing_traced, requests
from tests.tiny_model import build_tiny_model, write_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _plain_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No C++ operators, and a tracer that remembers nothing."""
    monkeypatch.setattr(cpu_attention, "load", lambda _: False)
    with nothing_traced():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("traced"), num_layers=3)


def answers(folder: Path, *, is_compiled: bool, **options: Any) -> list[list[int]]:
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, **options}
    stepping = Stepping(folder, CPU, torch.float32, is_compiled=is_compiled, **settings)
    assert stepping.is_compiled == is_compiled
    with torch.compiler.set_stance("fail_on_recompile" if is_compiled else "default"):
        return stepping.generate(requests(7)) + stepping.generate(requests(1))


def test_one_code_for_all_layers_and_steps(folder: Path) -> None:
    """Prefill in chunks, mixed steps, decoding and verification, and another number of KV blocks than was traced."""
    expected = answers(folder, is_compiled=False)
    assert answers(folder, is_compiled=True) == expected
    assert answers(folder, is_compiled=True, k=3, max_tokens=160) == expected
    assert counters["stats"]["unique_graphs"] == 2, "one for a single token, one for more"


@pytest.mark.full
def test_who_is_called_between_layers_changes_no_code(folder: Path) -> None:
    stepping = Stepping(folder, CPU, torch.float32, is_compiled=True, max_num_seqs=4, max_num_batched_tokens=16)
    calls: list[int] = []
    with torch.compiler.set_stance("fail_on_recompile"):
        expected = stepping.generate(requests(7))
        with LayerHooks(stepping.model.base_model, 3).calling(calls.append, calls.append):
            assert stepping.generate(requests(7)) == expected
        num_calls = len(calls)
        assert stepping.generate(requests(7)) == expected
    assert calls[:6] == [0, 0, 1, 1, 2, 2]
    assert len(calls) == num_calls


@pytest.mark.full
def test_layers_of_two_kinds(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Gemma3TextConfig(
        **sizes,
        head_dim=16,
        vocab_size=512,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=16,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 512)
    assert answers(tmp_path, is_compiled=True) == answers(tmp_path, is_compiled=False)
    assert counters["stats"]["unique_graphs"] == 4


class _Untraceable(nn.Module):
    """Looks at numbers while it runs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        return outputs if float(inputs.sum()) > -1e9 else inputs


def test_what_cannot_be_traced_runs_as_it_is(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    stepping = Stepping(folder, CPU, torch.float32, max_num_seqs=4, max_num_batched_tokens=16)
    expected = stepping.generate(requests(7))
    attention = stepping.model.config._attn_implementation
    for layer in stepping.model.base_model.layers:
        layer.mlp = _Untraceable(layer.mlp)
    caplog.set_level(logging.INFO)
    kv = stepping.runner.kv
    assert not trace_layers(stepping.model, 3, torch.zeros_like(kv[:2]))
    assert [record.levelname for record in caplog.records if "decoder layers" in record.message] == ["WARNING"]
    assert stepping.model.config._attn_implementation == attention
    bind_kv(stepping.model.base_model, kv)
    assert stepping.generate(requests(7)) == expected


@pytest.mark.full
def test_the_first_layers_draft_by_the_same_code(folder: Path) -> None:
    """They attend as the whole model does, by an operator that must be told of their steps as well."""
    config = LayerSkipConfig(method="layer_skip", num_layers=2, num_speculative_tokens=2)
    expected = answers(folder, is_compiled=False)
    assert answers(folder, is_compiled=True, k=2, build=lambda target: [config.build(target)]) == expected
    assert counters["stats"]["unique_graphs"] == 2
