"""Somebody is called between layers, whatever runs in the layers' place, and only in the passes that ask for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from server.config import ModelConfig
from server.model.attention import bind_kv
from server.model.compiled_layers import _OneCallList
from server.model.decoder_layers import find_decoder_layers
from server.model.forward import run_model
from server.model.layer_hooks import LayerHooks
from server.model.loader import load_model
from tests.fakes.paged_steps import block_table, step_over
from tests.tiny_model import build_tiny_model

NUM_LAYERS, BLOCK, LENGTH = 3, 16, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("hooks"), num_layers=NUM_LAYERS)


class Model:
    """A model with hooks, on a KV cache of a few blocks.

    Attributes: kv: [blocks, layers, ...]; block 0 is nobody's. ranges: of layers that were run in one go.
    """

    def __init__(self, folder: Path, *, is_compiled: bool) -> None:
        loaded = load_model(ModelConfig(model=str(folder)), torch.device("cpu"), torch.float32).model
        self.model: PreTrainedModel = loaded.base_model
        self.kv = torch.zeros(4, NUM_LAYERS, 2, BLOCK, 32)
        bind_kv(self.model, self.kv)
        self.layers = find_decoder_layers(self.model, NUM_LAYERS)
        self.hooks = LayerHooks(self.model, NUM_LAYERS)
        self.ranges: list[tuple[int, int]] = []
        if is_compiled:
            self.model.layers = _OneCallList(self.layers, self._run_layers(list(self.layers)))

    def _run_layers(self, layers: list[nn.Module]) -> Callable[..., Tensor]:
        """What runs some layers in one go, past their hooks, as compiled code does."""

        def run(begin: int, end: int, hidden: Tensor, **arguments: Any) -> Tensor:
            self.ranges.append((begin, end))
            for layer in layers[begin:end]:
                forward: Callable[..., Tensor] = layer.forward
                hidden = forward(hidden, **arguments)
            return hidden

        return run

    @torch.inference_mode()
    def run(self) -> Tensor:
        step = step_over([(0, 0, LENGTH)], block_table(1, 3), BLOCK)
        hidden: Tensor = run_model(self.model, torch.arange(LENGTH) + 3, step.positions, step).last_hidden_state
        return hidden

    @property
    def num_filled(self) -> int:
        """First layers that have K and V of the prompt."""
        return [*(bool(self.kv[1:, layer].any()) for layer in range(NUM_LAYERS)), False].index(False)

    @property
    def num_hooks(self) -> int:
        return sum(len(each._forward_pre_hooks) + len(each._forward_hooks) for each in (self.model, *self.layers))


@pytest.fixture(params=["layers", "code in their place"])
def model(folder: Path, request: pytest.FixtureRequest) -> Model:
    return Model(folder, is_compiled=request.param != "layers")


def test_each_layer_is_there_before_the_next_one_begins(model: Model) -> None:
    heard: list[tuple[str, int, int]] = []
    with model.hooks.calling(
        lambda layer: heard.append(("before", layer, model.num_filled)),
        lambda layer: heard.append(("after", layer, model.num_filled)),
    ):
        model.run()
    order = [(what, layer) for layer in range(NUM_LAYERS) for what in ("before", "after")]
    assert heard == [(what, layer, layer + (what == "after")) for what, layer in order]


def test_nobody_is_called_in_other_passes_and_layers_run_in_one_go_then(model: Model) -> None:
    heard: list[int] = []
    expected = model.run()
    assert model.num_hooks == 0
    assert model.ranges in ([], [(0, NUM_LAYERS)])
    with model.hooks.calling(heard.append, heard.append):
        assert torch.equal(model.run(), expected)
    num_heard = len(heard)
    assert torch.equal(model.run(), expected)
    assert (len(heard), model.num_hooks) == (num_heard, 0)
    assert model.ranges[-1:] in ([], [(0, NUM_LAYERS)])


def test_what_they_raise_ends_the_pass(model: Model) -> None:
    def fail(layer: int) -> None:
        if layer == 1:
            raise OSError("broken")

    def run() -> None:
        with model.hooks.calling(fail, lambda _: None):
            model.run()

    with pytest.raises(OSError, match="broken"):
        run()
    assert (model.num_filled, model.num_hooks) == (1, 0)
