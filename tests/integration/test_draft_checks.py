"""Settings of drafts that do not fit the target are refused before its weights are loaded."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from server.compose import build_core
from server.config import Config
from server.errors import ConfigError, ModelError
from server.model.loader import LoadedModel
from tests.tiny_heads import VOCAB, build_tiny_eagle, build_tiny_eagle3, build_tiny_medusa
from tests.tiny_model import build_tiny_model, write_tokenizer

Settings = dict[str, object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> LoadedModel:
        pytest.fail("weights are loaded")

    for user in ("server.composition.target", "proposers.draft_model"):
        monkeypatch.setattr(f"{user}.load_files", load)


def refusal(target: Path, given: object, **settings: object) -> str:
    config = Config.from_kwargs(model=str(target), device="cpu", speculative_config=given, **settings)
    with pytest.raises((ConfigError, ModelError)) as caught:
        build_core(config)
    return str(caught.value)


def changed(folder: Path, **values: object) -> Path:
    """With other values in its config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def emptied(folder: Path) -> Path:
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def without_tokenizer(folder: Path) -> Path:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    return folder


HEADS: dict[str, Callable[[Path], Path]] = {
    "eagle": build_tiny_eagle,
    "eagle3": build_tiny_eagle3,
    "medusa": build_tiny_medusa,
}


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: folder / "none", r"\.model: there is no folder .*none"),
        (lambda folder: changed(folder, vocab_size=VOCAB + 8), f": .* its vocabulary is {VOCAB + 8}, and .* {VOCAB}"),
        (lambda folder: changed(folder, hidden_size=32), ": .* its hidden size is 32, and the target's is 64"),
    ],
)
def test_a_head_that_does_not_fit(
    tmp_path: Path, target: Path, method: str, change: Callable[[Path], Path], message: str
) -> None:
    folder = change(HEADS[method](tmp_path / method))
    given = {"method": method, "model": str(folder), "num_speculative_tokens": 2}
    assert re.match(r"speculative_config" + message, refusal(target, given))
    assert re.match(r"speculative_config\[1\]" + message, refusal(target, [{"method": "ngram"}, given]))


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_whose_weights_have_another_shape(tmp_path: Path, target: Path, method: str) -> None:
    folder = changed(HEADS[method](tmp_path), intermediate_size=64)
    message = refusal(target, {"method": method, "model": str(folder)})
    assert message.startswith(f"speculative_config: {folder}: layers.0.mlp.")
    assert "and config.json calls for [64, 64]" in message


def test_more_drafts_than_heads(tmp_path: Path, target: Path) -> None:
    given = {"method": "medusa", "model": str(build_tiny_medusa(tmp_path)), "num_speculative_tokens": 4}
    message = refusal(target, [{"method": "ngram"}, given])
    assert message.startswith("speculative_config[1].num_speculative_tokens: must be at most 3, the number of heads")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: folder / "none", r"\.model: there is no folder or file .*none"),
        (lambda folder: changed(folder, model_type="nonsense"), r"\.model: cannot load"),
        (emptied, r"\.model: .*model.safetensors is broken"),
        (lambda folder: build_tiny_model(folder, vocab_size=400), r"\.model: has another vocabulary \(of 400, "),
    ],
)
def test_a_draft_model_that_does_not_fit(
    tmp_path: Path, target: Path, change: Callable[[Path], Path], message: str
) -> None:
    given = {"method": "draft_model", "model": str(change(build_tiny_model(tmp_path, num_layers=1)))}
    assert re.match(r"speculative_config" + message, refusal(target, given))
    assert re.match(r"speculative_config\[0\]" + message, refusal(target, [given, {"method": "ngram"}]))


def test_a_vocabulary_that_cannot_be_intersected(tmp_path: Path, target: Path) -> None:
    folder = without_tokenizer(build_tiny_model(tmp_path / "target", num_layers=1))
    draft = build_tiny_model(tmp_path / "draft", num_layers=1)
    given = {"method": "draft_model", "model": str(draft), "use_heterogeneous_vocab": True}
    assert refusal(folder, given, load_format="dummy") == (
        "speculative_config.use_heterogeneous_vocab: both models need a tokenizer.json, and one has none"
    )


NETWORKS: dict[str, Callable[[Path], Settings]] = {
    "draft_model": lambda folder: {"model": str(build_tiny_model(folder, num_layers=1))},
    "layer_skip": lambda _: {"num_layers": 1},
    **{method: (lambda folder, build=build: {"model": str(build(folder))}) for method, build in HEADS.items()},  # type: ignore[misc]
}


@pytest.mark.parametrize("method", [method for method in NETWORKS if method != "layer_skip"])
def test_a_model_for_another_method(tmp_path: Path, target: Path, method: str) -> None:
    other = "eagle3" if method == "medusa" else "medusa"
    folder = NETWORKS[other](tmp_path)["model"]
    message = refusal(target, {"method": method, "model": folder, "num_speculative_tokens": 2})
    assert message.startswith("speculative_config")
    assert message.split("; ")[-1] == f"by its config.json it is for the method {other}"


def test_nobody_knows_what_a_proposer_from_elsewhere_is_for(tmp_path: Path, target: Path) -> None:
    folder = build_tiny_model(tmp_path, num_layers=1)
    given = {"method": "proposers.eagle:EagleConfig", "model": str(folder)}
    assert refusal(target, given) == (
        f"speculative_config: {folder} lacks weights that its config.json calls for: fc.weight"
    )


@pytest.mark.parametrize("method", NETWORKS)
def test_more_devices_than_one(tmp_path: Path, target: Path, method: str) -> None:
    given = {"method": method, **NETWORKS[method](tmp_path), "draft_tensor_parallel_size": 2}
    assert refusal(target, [{"method": "ngram"}, given]) == (
        "speculative_config[1].draft_tensor_parallel_size: must be 1, as the model runs on one device, got 2"
    )


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_a_type_that_attention_cannot_read(tmp_path: Path, target: Path, method: str) -> None:
    given = {"method": method, **NETWORKS[method](tmp_path), "kv_cache_dtype": "float16"}
    message = refusal(target, [given, {"method": "ngram"}], dtype="float32")
    assert message.startswith("speculative_config[0].kv_cache_dtype: the CPU keeps float32, bfloat16, fp8_e4m3 or")
    assert message.endswith("got float16")


def test_more_layers_than_the_target_has(target: Path) -> None:
    assert refusal(target, [{"method": "ngram"}, {"method": "layer_skip", "num_layers": 2}]) == (
        "speculative_config[1].num_layers: must be from 1 to 1, as the target has 2 layers, got 2"
    )


def test_a_target_that_always_runs_all_its_layers(tmp_path: Path) -> None:
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 64, "vocab_size": VOCAB}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, VOCAB)
    assert refusal(tmp_path, {"method": "layer_skip", "num_layers": 1}) == (
        "speculative_config.method: layer_skip cannot leave out layers of gpt2, which always runs all of them"
    )


def test_a_head_that_nobody_has_shipped(target: Path) -> None:
    assert refusal(target, {"method": "medusa"}).startswith(
        "speculative_config.model: there is no medusa head for this model here; name a folder or a hub id"
    )


def test_what_fits_is_loaded(tmp_path: Path, target: Path) -> None:
    given = [
        {"method": method, **NETWORKS[method](tmp_path / method), "num_speculative_tokens": 2} for method in NETWORKS
    ]
    config = Config.from_kwargs(model=str(target), device="cpu", speculative_config=given)
    with pytest.raises(pytest.fail.Exception, match="weights are loaded"):
        build_core(config)
