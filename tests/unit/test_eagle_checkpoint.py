"""Published forms of EAGLE heads come to the same, and what does not fit is refused by name."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from proposers.base import TargetModel
from proposers.checkpoint import read_checkpoint
from proposers.eagle_checkpoint import EagleHead, Kind, Norms, eagle_head
from proposers.eagle_network import EagleNetwork
from server.errors import ModelError
from tests.fakes.tiny_target import target_model
from tests.tiny_heads import HIDDEN, VOCAB, build_tiny_eagle, build_tiny_eagle3
from tests.tiny_model import build_tiny_model

FILES = ("model.safetensors", "pytorch_model.bin")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return target_model(build_tiny_model(tmp_path_factory.mktemp("target"), num_layers=6), "cpu")


def read(folder: Path, target: TargetModel, kind: Kind) -> EagleHead:
    return eagle_head(read_checkpoint(str(folder)), target, kind)


def load(folder: Path, target: TargetModel, kind: Kind) -> EagleNetwork:
    return EagleNetwork(read(folder, target, kind), target, torch.device("cpu"), torch.float32)


def same(first: EagleHead, second: EagleHead) -> bool:
    assert first.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())
    return (first.taps, first.norms, first.vocab_size) == (second.taps, second.norms, second.vocab_size)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_eagle_in_either_form(tmp_path: Path, target: TargetModel, file: str, has_bias: bool) -> None:
    own = read(build_tiny_eagle(tmp_path / "own", has_bias=has_bias, file=file), target, "eagle")
    folder = build_tiny_eagle(tmp_path / "other", form="speculators", has_bias=has_bias)
    assert ("fc.bias" in own.tensors) is has_bias
    assert same(own, read(folder, target, "eagle"))
    assert own.taps is None


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("size", [VOCAB, 96])
def test_eagle3_in_either_form(tmp_path: Path, target: TargetModel, file: str, size: int) -> None:
    own = read(build_tiny_eagle3(tmp_path / "own", draft_vocab_size=size, file=file), target, "eagle3")
    folder = build_tiny_eagle3(tmp_path / "other", form="speculators", draft_vocab_size=size)
    other = read(folder, target, "eagle3")
    assert same(own, other)
    assert own.vocab_size == size
    assert (own.to_target is None) == (size == VOCAB)
    if own.to_target is not None and other.to_target is not None:
        assert own.to_target.tolist() == other.to_target.tolist() == sorted(set(own.to_target.tolist()))


def test_a_reduced_vocabulary_need_not_be_counted(tmp_path: Path, target: TargetModel) -> None:
    folder = build_tiny_eagle3(tmp_path / "head", draft_vocab_size=96)
    expected = read(folder, target, "eagle3")
    config = json.loads((folder / "config.json").read_text())
    del config["draft_vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    assert same(read(folder, target, "eagle3"), expected)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_weights_that_only_training_needed_are_left_out(tmp_path: Path, target: TargetModel, prefix: str) -> None:
    folder = build_tiny_eagle3(tmp_path / "head")
    expected = read(folder, target, "eagle3")
    tensors = {prefix + name: tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    extra = {"verifier_norm.weight": torch.ones(HIDDEN), "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors | extra, folder / "model.safetensors")
    assert same(read(folder, target, "eagle3"), expected)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (0, 1)),
        ({"eagle_aux_hidden_state_layer_ids": [5, 0, 2]}, (5, 0, 2)),
        ({"eagle_aux_hidden_state_layer_ids": None}, (2, 3, 3)),
        ({"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"use_aux_hidden_state": True}}, (2, 3, 3)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": None,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
            },
            (2, 3, 5),
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}}, None),
    ],
    ids=str,
)
def test_the_layers_it_taps(
    tmp_path: Path, target: TargetModel, change: dict[str, Any], expected: tuple[int, ...] | None
) -> None:
    folder = build_tiny_eagle3(tmp_path / "head", options=change)
    assert read(folder, target, "eagle3").taps == expected


def test_without_taps_it_takes_the_last_hidden_state(tmp_path: Path, target: TargetModel) -> None:
    folder = build_tiny_eagle3(tmp_path / "head", options={"eagle_config": {"use_aux_hidden_state": False}})
    tensors = load_file(folder / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, folder / "model.safetensors")
    network = load(folder, target, "eagle3")
    assert network.features == "last"
    hidden = torch.randn(3, HIDDEN)
    assert network.condense(hidden) is hidden


def test_norms_are_read_from_either_place(tmp_path: Path, target: TargetModel) -> None:
    names = ("norm_before_fc", "norm_before_residual", "norm_output")
    nested: dict[str, Any] = {"eagle_config": dict.fromkeys(names, True), "norm_output": False}
    for number, options in enumerate((dict.fromkeys(names, True), nested)):
        folder = build_tiny_eagle3(tmp_path / str(number), options=options)
        assert read(folder, target, "eagle3").norms == Norms(before_fc=True, before_residual=True, of_output=True)


def test_rope_scaling_of_old_files_is_understood(tmp_path: Path, target: TargetModel) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = build_tiny_eagle3(tmp_path / "head", options={"rope_scaling": scaling, "rope_theta": 500000.0})
    config = read(folder, target, "eagle3").config
    assert config.rope_parameters["rope_theta"] == 500000.0
    assert config.rope_parameters["factor"] == 8.0
    load(folder, target, "eagle3")


def drop(*names: str) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


def set_to(**entries: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, _: config.update(entries)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda _, tensors: tensors.update({name: tensor})


REFUSALS = [
    (drop("fc.weight", "norm.weight"), r"lacks weights .*: fc.weight, norm.weight"),
    (put("mask_hidden", torch.ones(3)), r"does not call for: mask_hidden"),
    (put("fc.weight", torch.ones(HIDDEN, 7)), r"fc.weight has the shape \[64, 7\], .* calls for \[64, 128\]"),
    (set_to(vocab_size=500, draft_vocab_size=500), r"its vocabulary is 500, and the target's is 512"),
    (set_to(hidden_size=32), r"its hidden size is 32, and the target's is 64"),
    (set_to(target_hidden_size=96), r"its hidden size is 96, and the target's is 64"),
    (set_to(draft_vocab_size=100), r"lacks d2t, without which its 100 tokens are not known among 512"),
    (put("d2t", torch.zeros(9)), r"d2t has the shape \[9\], and draft_vocab_size is 512"),
    (put("d2t", torch.arange(VOCAB)), r"d2t leads to ids twice, or out of the vocabulary of 512"),
    (put("d2t", -torch.arange(VOCAB)), r"d2t leads to ids twice"),
    (set_to(eagle_aux_hidden_state_layer_ids=[1, 6]), r"in front of the layers \[1, 6\] of its target, which has 6"),
    (set_to(model_type="mamba"), r"decoder layers of mamba; supported are those of llama, qwen2, qwen3"),
    (set_to(hidden_size="wide"), r"describes no decoder layers"),
    (set_to(num_hidden_layers=0), r"describes no decoder layers: num_hidden_layers is 0"),
    (set_to(speculators_model_type="peagle"), r"of the kind peagle, and the method is eagle3"),
    (drop("midlayer.hidden_norm.weight"), r"of the kind eagle, and the method is eagle3"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_what_does_not_fit_is_named(
    tmp_path: Path,
    target: TargetModel,
    change: Callable[[dict[str, Any], dict[str, Tensor]], None],
    message: str,
) -> None:
    folder = build_tiny_eagle3(tmp_path / "head")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message) as caught:
        load(folder, target, "eagle3")
    assert str(folder) in str(caught.value)


def test_maps_that_contradict_each_other(tmp_path: Path, target: TargetModel) -> None:
    folder = build_tiny_eagle3(tmp_path / "head", draft_vocab_size=96)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "t2d": ~tensors["t2d"]}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="t2d and d2t contradict each other"):
        read(folder, target, "eagle3")


def test_a_narrower_head_needs_an_embedding_of_its_own(tmp_path: Path, target: TargetModel) -> None:
    folder = build_tiny_eagle3(tmp_path / "head", options={"target_hidden_size": HIDDEN})
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    narrow = {
        name: tensor[tuple([slice(32 if size == HIDDEN else 64 if size == 128 else size) for size in tensor.shape])]
        for name, tensor in tensors.items()
        if "mlp" not in name and "self_attn" not in name and name != "fc.weight"
    }
    narrow["fc.weight"] = tensors["fc.weight"][:32]
    for name, tensor in tensors.items():
        if "mlp" in name:
            narrow[name] = tensor[:32] if "down" in name else tensor[:, :32]
        elif "self_attn" in name:
            narrow[name] = tensor[:32] if "o_proj" in name else tensor[:, :64]
    save_file({name: tensor.contiguous() for name, tensor in narrow.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    with pytest.raises(ModelError, match=r"lacks embed_tokens.weight, and .*hidden size is 32 there and 64 here"):
        load(folder, target, "eagle3")
    narrow["embed_tokens.weight"] = torch.randn(VOCAB, 32)
    save_file({name: tensor.contiguous() for name, tensor in narrow.items()}, folder / "model.safetensors")
    network = load(folder, target, "eagle3")
    assert network.hidden_size == 32
    assert network.condense(torch.randn(3, 2 * HIDDEN)).shape == (3, 32)


def test_eagle_with_layernorms_is_refused(tmp_path: Path, target: TargetModel) -> None:
    folder = build_tiny_eagle(tmp_path / "head", form="speculators")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "layernorms": True}))
    with pytest.raises(ModelError, match="has layernorms"):
        read(folder, target, "eagle")


class Attack:
    """What a pickle may hold to run code as it is read."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("false",)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no config.json"),
        ({"config.json": b"{"}, "config.json is broken"),
        ({"config.json": b"[]"}, "is no JSON object"),
        ({"config.json": b"{}"}, "neither safetensors files nor pytorch_model"),
        ({"config.json": b"{}", "model.safetensors": b"x"}, "broken"),
        ({"config.json": b"{}", "other.safetensors": b"0123456789"}, "broken"),
        ({"config.json": b"{}", "pytorch_model.bin": b""}, "broken"),
        ({"config.json": b"{}", "pytorch_model.bin": b"PK nothing"}, "pytorch_model.bin is "),
        ({"config.json": b"{}", "pytorch_model.bin": Attack()}, "no pickle of tensors alone"),
        ({"config.json": b"{}", "pytorch_model.bin": {"fc.weight": 3}}, "holds more than tensors by name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_files(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    for name, content in files.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            torch.save(content, tmp_path / name)
    with pytest.raises(ModelError, match=message):
        read_checkpoint(str(tmp_path))


@pytest.mark.parametrize("model", ["nowhere", "./nowhere", "/nowhere/at/all"])
def test_no_such_folder(model: str) -> None:
    with pytest.raises(ModelError, match=r"there is no folder .*nowhere"):
        read_checkpoint(model)


def test_a_revision_is_for_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="revision v1 is for hub ids"):
        read_checkpoint(str(tmp_path), "v1")


@pytest.mark.parametrize("file", FILES)
def test_of_a_hub_repository_pickles_are_fetched_only_if_there_is_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    build_tiny_eagle(tmp_path, file=file)
    asked: list[bool] = []

    def fetch(repo_id: str, revision: str | None, *, also: tuple[str, ...] = ()) -> Path:
        assert (repo_id, revision) == ("owner/head", "v1")
        asked.append(bool(also))
        return tmp_path

    monkeypatch.setattr("proposers.checkpoint.fetch_from_hub", fetch)
    assert "fc.weight" in read_checkpoint("owner/head", "v1").tensors
    assert asked == ([False] if file == FILES[0] else [False, True])
