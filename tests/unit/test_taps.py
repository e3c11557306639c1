"""Hidden states are kept where they enter a layer, whatever runs in the layers' place; first layers run alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from proposers.base import TargetModel
from proposers.layer_skip import FirstLayers
from server.config import ModelConfig
from server.errors import ConfigError
from server.model.attention import AttentionStep, bind_kv
from server.model.compiled_layers import _OneCallList
from server.model.decoder_layers import find_decoder_layers
from server.model.forward import run_model
from server.model.head import LMHead
from server.model.loader import load_model
from server.model.taps import LayerTaps, has_taps
from tests.fakes.paged_steps import block_table, step_over
from tests.tiny_model import build_tiny_model, write_tokenizer

NUM_LAYERS, BLOCK = 4, 16
KV_SHAPE = (4, NUM_LAYERS, 2, BLOCK, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("taps"), num_layers=NUM_LAYERS)


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    """On a KV cache of a few blocks."""
    loaded = load_model(ModelConfig(model=str(folder)), torch.device("cpu"), torch.float32).model
    bind_kv(loaded.base_model, torch.zeros(KV_SHAPE))
    return loaded


@pytest.fixture(params=["layers", "code in their place"])
def finish(request: pytest.FixtureRequest) -> Callable[[PreTrainedModel], None]:
    """Leaves a model as it is, or replaces its list of layers as for compiled code, which comes last."""

    def replace(model: PreTrainedModel) -> None:
        layers = find_decoder_layers(model, NUM_LAYERS)
        model.base_model.layers = _OneCallList(layers, running(layers))

    return replace if request.param != "layers" else lambda _: None


def running(layers: nn.ModuleList) -> Callable[..., Tensor]:
    """What runs some layers at a time, past their hooks, as compiled code does."""
    modules = list(layers)

    def run(begin: int, end: int, hidden: Tensor, **arguments: Any) -> Tensor:
        assert begin < end
        for layer in modules[begin:end]:
            forward: Callable[..., Tensor] = layer.forward
            hidden = forward(hidden, **arguments)
        return hidden

    return run


def prompt(length: int = 20) -> tuple[Tensor, AttentionStep]:
    return torch.arange(length) * 7 % 500, step_over([(0, 0, length)], block_table(1, 3), BLOCK)


@torch.inference_mode()
def expected_states(folder: Path, token_ids: Tensor) -> tuple[Tensor, ...]:
    """[T, hidden] in front of each layer, by transformers alone; the last one is behind the norm."""
    model = load_model(ModelConfig(model=str(folder)), torch.device("cpu"), torch.float32).model
    model.set_attn_implementation("eager")
    states = model(token_ids[None], output_hidden_states=True, use_cache=False).hidden_states
    return tuple(state[0] for state in states)


@pytest.mark.parametrize("indices", [(), (0,), (1,), (3,), (0, 2), (1, 2, 3), (0, 1, 2, 3)], ids=str)
@torch.inference_mode()
def test_what_enters_a_layer_is_kept(
    folder: Path, model: PreTrainedModel, finish: Callable[[PreTrainedModel], None], indices: tuple[int, ...]
) -> None:
    """And the model goes on as if nobody looked."""
    taps = LayerTaps(model.base_model, NUM_LAYERS, indices)
    finish(model)
    token_ids, step = prompt()
    states = expected_states(folder, token_ids)
    for _ in range(2):
        hidden = run_model(model.base_model, token_ids, step.positions, step).last_hidden_state[0]
        torch.testing.assert_close(hidden, states[-1], rtol=1e-4, atol=1e-4)
        taken = taps.take()
        assert sorted(taken) == list(indices)
        for index in indices:
            torch.testing.assert_close(taken[index], states[index], rtol=1e-4, atol=1e-4)
    assert not taps.take()


@torch.inference_mode()
def test_nobody_looks_for_one_that_is_gone(model: PreTrainedModel) -> None:
    """A runner that only measured memory must not keep hidden states of those after it."""
    taps = LayerTaps(model.base_model, NUM_LAYERS, [1])
    del taps
    assert not any(has_taps(layer) for layer in model.base_model.layers)


@pytest.mark.parametrize("index", [-1, NUM_LAYERS])
def test_a_layer_that_there_is_not(model: PreTrainedModel, index: int) -> None:
    with pytest.raises(ConfigError, match=f"layer {index} are asked for; the target has {NUM_LAYERS} layers"):
        LayerTaps(model.base_model, NUM_LAYERS, [index])


def target(model: PreTrainedModel) -> TargetModel:
    return TargetModel(
        model=model,
        head=LMHead.of(model, model.config),
        config=model.config,
        tokenizer=None,
        folder=Path(),
        dtype=torch.float32,
        digest="",
        block_size=BLOCK,
        max_num_tokens=64,
    )


@pytest.mark.parametrize("num_layers", range(1, NUM_LAYERS))
@torch.inference_mode()
def test_first_layers_run_alone(
    folder: Path, model: PreTrainedModel, finish: Callable[[PreTrainedModel], None], num_layers: int
) -> None:
    """What enters the layer behind them, through the norm; others may look at the whole model meanwhile."""
    layers = FirstLayers(target(model), num_layers)
    layers.check()
    taps = LayerTaps(model.base_model, NUM_LAYERS, [NUM_LAYERS - 1])
    finish(model)
    token_ids, step = prompt()
    hidden = layers.forward(token_ids, step.positions, step, None)
    assert not taps.take(), "the last layer ran"
    state = expected_states(folder, token_ids)[num_layers]
    torch.testing.assert_close(hidden, model.base_model.norm(state), rtol=1e-4, atol=1e-4)
    whole = run_model(model.base_model, token_ids, step.positions, step).last_hidden_state[0]
    torch.testing.assert_close(whole, expected_states(folder, token_ids)[-1], rtol=1e-4, atol=1e-4)


def test_first_layers_are_one_call_where_all_are(model: PreTrainedModel) -> None:
    first = FirstLayers(target(model), 2)
    layers = find_decoder_layers(model, NUM_LAYERS)
    run, spans = running(layers), list[tuple[int, int]]()

    def noted(begin: int, end: int, hidden: Tensor, **arguments: Any) -> Tensor:
        spans.append((begin, end))
        return run(begin, end, hidden, **arguments)

    model.base_model.layers = _OneCallList(layers, noted)
    token_ids, step = prompt()
    with torch.inference_mode():
        first.forward(token_ids, step.positions, step, None)
        run_model(model.base_model, token_ids, step.positions, step)
    assert spans == [(0, 2), (0, NUM_LAYERS)]


def test_a_model_that_always_runs_all_layers_is_refused(tmp_path: Path) -> None:
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 64, "vocab_size": 512}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 512)
    model = load_model(ModelConfig(model=str(tmp_path)), torch.device("cpu"), torch.float32).model
    bind_kv(model.base_model, torch.zeros(4, 3, 4, BLOCK, 32))
    with pytest.raises(ConfigError, match="layer_skip cannot leave out layers of gpt2"):
        FirstLayers(target(model), 1).check()
