"""The mode that redirects a model's sums, with the kernels' twins in their place."""

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from server.compose import build_core
from server.config import Config
from server.errors import ConfigError, ModelError
from server.model import invariance
from server.model.attention import ATTENTION_NAME, CUDA_ATTENTION_NAME, INVARIANT_ATTENTION_NAME
from server.model.fusion import can_pack, merge_linears
from server.model.invariance import Invariant, make_invariant
from tests.tiny_model import build_tiny_model

needs_compiler = pytest.mark.skipif(not can_pack(torch.device("cpu")), reason="no C++ compiler")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each kernel's twin was called in the kernel's place."""
    counts = {"linear": 0, "mean": 0}

    def linear(*args: Any) -> Tensor:
        counts["linear"] += 1
        return functional.linear(*args)

    def mean(x: Tensor) -> Tensor:
        counts["mean"] += 1
        assert x.is_contiguous()
        return x.sum(-1, keepdim=True) / x.shape[-1]

    monkeypatch.setattr(invariance, "invariant_linear", linear)
    monkeypatch.setattr(invariance, "invariant_mean", mean)
    return counts


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path))
    return loaded.eval()


@torch.inference_mode()
def test_every_sum_of_a_decoder_is_redirected(model: PreTrainedModel, calls: dict[str, int]) -> None:
    token_ids = torch.arange(1, 9)[None]
    expected = model.base_model(token_ids, use_cache=False).last_hidden_state
    merge_linears(model.base_model)
    with Invariant():
        found = model.base_model(token_ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert calls == {"linear": 2 * 4, "mean": 2 * 2 + 1}, "merged projections, and a norm of each kind"


@torch.inference_mode()
def test_means_over_the_last_dimension(calls: dict[str, int]) -> None:
    x = torch.randn(3, 4, 5)
    with Invariant():
        found = [x.mean(-1, keepdim=True), x.mean(2), torch.mean(x, dim=(-1,)), x.transpose(1, 2).mean(-1), x.mean(0)]
    expected = [x.mean(-1, keepdim=True), x.mean(2), x.mean(-1), x.mean(1), x.mean(0)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert calls["mean"] == 4, "the last is over rows"


def test_other_products_are_refused() -> None:
    x = torch.randn(3, 4)
    with Invariant():
        assert (x[:, :1] @ x[:1]).shape == (3, 4)  # sums nothing
        for product in (torch.matmul, operator.matmul, torch.mm, Tensor.mm):
            with pytest.raises(ModelError, match="does not know this architecture"):
                product(x, x.T)


def test_where_there_are_kernels(model: PreTrainedModel) -> None:
    model.config._attn_implementation = CUDA_ATTENTION_NAME
    make_invariant(model, is_packed=False)
    assert model.config._attn_implementation == INVARIANT_ATTENTION_NAME
    model.config._attn_implementation = ATTENTION_NAME
    with pytest.raises(ConfigError, match="C\\+\\+ compiler"):
        make_invariant(model, is_packed=True)


@needs_compiler
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_on_the_cpu_packed_models_are_invariant(tmp_path: Path, enforce_eager: bool) -> None:
    config = Config.from_kwargs(
        model=str(build_tiny_model(tmp_path)),
        device="cpu",
        batch_invariant=True,
        enforce_eager=enforce_eager,
        kv_cache_memory_bytes="4MiB",
        compile="none",
    )
    if enforce_eager:
        with pytest.raises(ConfigError, match="--enforce-eager"):
            build_core(config)
    else:
        assert isinstance(build_core(config).engine.model_info.dtype, str)
