"""EAGLE and EAGLE-3 heads over paged blocks, against the same written out over whole sequences."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from proposers.base import TargetModel
from proposers.checkpoint import read_checkpoint
from proposers.eagle_checkpoint import eagle_head
from proposers.eagle_network import EagleNetwork
from server.model.fusion import can_pack
from server.worker.kv_tensors import KVGeometry, allocate_kv
from tests.fakes.paged_steps import Piece, block_table, step_over
from tests.fakes.tiny_target import target_model
from tests.tiny_heads import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, build_tiny_eagle, build_tiny_eagle3
from tests.tiny_model import build_tiny_model

LENGTHS = (21, 5, 17)
BLOCK = 16
CHUNKS: dict[str, list[list[Piece]]] = {
    "at once": [[(slot, 1, length - 1) for slot, length in enumerate(LENGTHS)]],
    "chunked": [[(0, 1, 9), (1, 1, 2)], [(2, 1, 16), (1, 3, 2)], [(0, 10, 11)]],
    "one by one": [[(slot, p, 1) for slot, length in enumerate(LENGTHS) if p < length] for p in range(1, max(LENGTHS))],
}
EAGLE3_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced vocabulary": {"draft_vocab_size": 100},
    "the target's output": {"has_output": False},
    "the target's output, reduced": {"has_output": False, "draft_vocab_size": 100},
    "own embedding": {"has_embedding": True},
    "three taps, one norm": {"taps": (1, 0, 1), "options": {"norm_before_fc": True}},
    "a norm for each tap": {"options": {"fc_norm": True}},
    "norm before residual": {"options": {"norm_before_residual": True}},
    "norm of output": {"options": {"norm_output": True}},
    "two layers": {"num_layers": 2},
    "qwen3": {"model_type": "qwen3"},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, device_name: str) -> TargetModel:
    return target_model(build_tiny_model(tmp_path_factory.mktemp("target")), device_name)


def network_of(folder: Path, target: TargetModel, device: str, *, is_eagle3: bool) -> EagleNetwork:
    head = eagle_head(read_checkpoint(str(folder)), target, "eagle3" if is_eagle3 else "eagle")
    network = EagleNetwork(head, target, torch.device(device), torch.float32)
    shape = network.kv_shape
    geometry = KVGeometry(shape.num_layers, shape.num_kv_heads, shape.head_dim, BLOCK, shape.dtype)
    network.bind_kv(allocate_kv(geometry, 1 + len(LENGTHS) * 2, torch.device(device)).normal_())
    return network


def sequences(num_features: int, device: str) -> list[tuple[Tensor, Tensor]]:
    """Of each its tokens, and at p what the target made of token p - 1."""
    generator = torch.Generator().manual_seed(4)
    return [
        (
            torch.randint(VOCAB, (length,), generator=generator).to(device),
            torch.randn(length, num_features, generator=generator).to(device),
        )
        for length in LENGTHS
    ]


def run(network: EagleNetwork, features: list[tuple[Tensor, Tensor]], steps: list[list[Piece]]) -> list[Tensor]:
    """What the network makes of positions 1 and up of each sequence."""
    table = block_table(len(LENGTHS), 2).to(features[0][0].device)
    outputs: list[list[Tensor]] = [[] for _ in features]
    for pieces in steps:
        step = step_over(pieces, table, BLOCK, first=1)
        token_ids = torch.cat([features[slot][0][first : first + count] for slot, first, count in pieces])
        given = torch.cat([features[slot][1][first : first + count] for slot, first, count in pieces])
        output = network.forward(token_ids, step.positions, step, network.condense(given))
        for (slot, _, _), part in zip(pieces, output.split([count for _, _, count in pieces]), strict=True):
            outputs[slot].append(part)
    return [torch.cat(parts) for parts in outputs]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def dense_attention(weights: Mapping[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """[T, in] -> [T, hidden], every token to those before it and itself; the first is at position 1."""
    num_tokens = x.shape[0]
    query = (x @ weights[prefix + "q_proj.weight"].T).view(num_tokens, HEADS, HEAD_DIM)
    key = (x @ weights[prefix + "k_proj.weight"].T).view(num_tokens, KV_HEADS, HEAD_DIM)
    value = (x @ weights[prefix + "v_proj.weight"].T).view(num_tokens, KV_HEADS, HEAD_DIM)
    if prefix + "q_norm.weight" in weights:
        query, key = norm(query, weights[prefix + "q_norm.weight"]), norm(key, weights[prefix + "k_norm.weight"])
    position = torch.arange(1, 1 + num_tokens, device=x.device)[:, None]
    angle = position / 10000 ** (torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    groups = HEADS // KV_HEADS
    query, key, value = turned(query), turned(key).repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5
    ahead = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=x.device).triu(1)
    mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), value)
    return mixed.reshape(num_tokens, -1) @ weights[prefix + "o_proj.weight"].T


def dense_rest(weights: Mapping[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """The part of a layer behind its attention."""
    y = norm(x, weights[prefix + "post_attention_layernorm.weight"])
    gate, up = y @ weights[prefix + "mlp.gate_proj.weight"].T, y @ weights[prefix + "mlp.up_proj.weight"].T
    return x + (functional.silu(gate) * up) @ weights[prefix + "mlp.down_proj.weight"].T


def dense_layer(weights: Mapping[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """A usual decoder layer."""
    y = norm(x, weights[prefix + "input_layernorm.weight"])
    return dense_rest(weights, prefix, x + dense_attention(weights, prefix + "self_attn.", y))


def dense_eagle(weights: Mapping[str, Tensor], embeds: Tensor, hidden: Tensor, num_layers: int) -> Tensor:
    x = torch.cat((embeds, hidden), -1) @ weights["fc.weight"].T + weights.get("fc.bias", torch.zeros(())).to(hidden)
    x = dense_rest(weights, "layers.0.", x + dense_attention(weights, "layers.0.self_attn.", x))
    for index in range(1, num_layers):
        x = dense_layer(weights, f"layers.{index}.", x)
    return x


def dense_eagle3(
    weights: Mapping[str, Tensor], embeds: Tensor, features: Tensor, config: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """What is fed back, and what the output projection takes."""
    if config.get("norm_before_fc"):
        features = norm(features, weights["input_norm.weight"])
    if config.get("fc_norm"):
        taps = features.split(HIDDEN, -1)
        features = torch.cat([norm(tap, weights[f"fc_norm.{i}.weight"]) for i, tap in enumerate(taps)], -1)
    hidden = features @ weights["fc.weight"].T
    normed = norm(hidden, weights["midlayer.hidden_norm.weight"])
    x = torch.cat((norm(embeds, weights["midlayer.input_layernorm.weight"]), normed), -1)
    attended = dense_attention(weights, "midlayer.self_attn.", x)
    x = dense_rest(weights, "midlayer.", (normed if config.get("norm_before_residual") else hidden) + attended)
    for index in range(1, config["num_hidden_layers"]):
        x = dense_layer(weights, f"layers.{index}.", x)
    output = norm(x, weights["norm.weight"])
    return (output if config.get("norm_output") else x), output


@pytest.mark.parametrize("steps", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("options", [{}, {"has_bias": True, "num_layers": 2}], ids=["plain", "bias, two layers"])
@torch.inference_mode()
def test_eagle_over_blocks_equals_whole_sequences(
    tmp_path: Path, target: TargetModel, device_name: str, options: dict[str, Any], steps: list[list[Piece]]
) -> None:
    folder = build_tiny_eagle(tmp_path / "head", **options)
    network = network_of(folder, target, device_name, is_eagle3=False)
    assert (network.features, network.num_features, network.hidden_size) == ("last", HIDDEN, HIDDEN)
    assert network.to_target is None
    weights = {name: tensor.to(device_name) for name, tensor in read_checkpoint(str(folder)).tensors.items()}
    embedding = target.model.get_input_embeddings().weight
    given = sequences(HIDDEN, device_name)
    for got, (token_ids, hidden) in zip(run(network, given, steps), given, strict=True):
        expected = dense_eagle(weights, embedding[token_ids[1:]], hidden[1:], options.get("num_layers", 1))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(network.logits(got), target.head.logits(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("steps", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("options", EAGLE3_OPTIONS.values(), ids=EAGLE3_OPTIONS)
@torch.inference_mode()
def test_eagle3_over_blocks_equals_whole_sequences(
    tmp_path: Path, target: TargetModel, device_name: str, options: dict[str, Any], steps: list[list[Piece]]
) -> None:
    folder = build_tiny_eagle3(tmp_path / "head", **options)
    network = network_of(folder, target, device_name, is_eagle3=True)
    taps = options.get("taps", (0, 1))
    assert (network.features, network.num_features, network.hidden_size) == (taps, len(taps) * HIDDEN, HIDDEN)
    checkpoint = read_checkpoint(str(folder))
    weights = {name: tensor.to(device_name) for name, tensor in checkpoint.tensors.items()}
    embedding = weights.get("embed_tokens.weight", target.model.get_input_embeddings().weight)
    known = torch.arange(VOCAB, device=device_name)
    if "t2d" in weights:
        known = weights["t2d"].nonzero()[:, 0]
        assert network.to_target is not None
        assert network.to_target.tolist() == known.tolist()
    output_weight = weights.get("lm_head.weight", target.head.weight[known])
    given = sequences(len(taps) * HIDDEN, device_name)
    for got, (token_ids, features) in zip(run(network, given, steps), given, strict=True):
        fed_back, output = dense_eagle3(weights, embedding[token_ids[1:]], features[1:], checkpoint.config)
        torch.testing.assert_close(got, fed_back, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(network.logits(got), output @ output_weight.T, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_k_and_v_may_be_kept_in_another_type(tmp_path: Path, target: TargetModel, device_name: str) -> None:
    folder = build_tiny_eagle3(tmp_path / "head")
    head = eagle_head(read_checkpoint(str(folder)), target, "eagle3")
    network = EagleNetwork(head, target, torch.device(device_name), torch.bfloat16)
    assert network.kv_shape.dtype == torch.bfloat16
    network.bind_kv(torch.zeros(7, 1, KV_HEADS, BLOCK, 2 * HEAD_DIM, dtype=torch.bfloat16, device=device_name))
    given = sequences(2 * HIDDEN, device_name)
    exact = run(network_of(folder, target, device_name, is_eagle3=True), given, CHUNKS["chunked"])
    for got, expected in zip(run(network, given, CHUNKS["chunked"]), exact, strict=True):
        assert 0 < float((got - expected).abs().max()) < 0.2 * float(expected.abs().max())


@torch.inference_mode()
def test_in_bfloat16_it_says_about_the_same(tmp_path: Path, target: TargetModel, device_name: str) -> None:
    folder = build_tiny_eagle3(tmp_path / "head")
    narrow = target_model(target.folder, device_name, torch.bfloat16)
    network = EagleNetwork(
        eagle_head(read_checkpoint(str(folder)), narrow, "eagle3"), narrow, torch.device(device_name), torch.bfloat16
    )
    network.bind_kv(torch.zeros(7, 1, KV_HEADS, BLOCK, 2 * HEAD_DIM, dtype=torch.bfloat16, device=device_name))
    given = sequences(2 * HIDDEN, device_name)
    rounded = [(token_ids, features.bfloat16()) for token_ids, features in given]
    exact = run(network_of(folder, target, device_name, is_eagle3=True), given, CHUNKS["at once"])
    for got, expected in zip(run(network, rounded, CHUNKS["at once"]), exact, strict=True):
        assert got.dtype == torch.bfloat16
        assert network.logits(got).dtype == torch.float32
        assert float((got - expected).abs().max()) < 0.1 * float(expected.abs().max())


@pytest.mark.parametrize("runs_plain", [False, True])
@torch.inference_mode()
def test_modules_stay_as_they_are_where_the_target_s_do(
    tmp_path: Path, target: TargetModel, device_name: str, runs_plain: bool
) -> None:
    folder = build_tiny_eagle3(tmp_path / "head")
    network = network_of(folder, replace(target, runs_plain=runs_plain), device_name, is_eagle3=True)
    device = torch.device(device_name)
    is_changed = not runs_plain and (can_pack(device) or device.type == "cuda")
    projection = network.body.layers.get_submodule("layers.0.self_attn.q_proj")
    assert (type(projection) is not torch.nn.Linear) is is_changed
    given = sequences(2 * HIDDEN, device_name)
    other = network_of(folder, target, device_name, is_eagle3=True)
    for got, expected in zip(run(network, given, CHUNKS["at once"]), run(other, given, CHUNKS["at once"]), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_copy_of_the_target_s_embedding_is_not_kept(tmp_path: Path, target: TargetModel, device_name: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = build_tiny_eagle3(tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    shared = target.model.get_input_embeddings().weight
    save_file({**tensors, "embed_tokens.weight": shared.cpu().clone()}, folder / "model.safetensors")
    network = network_of(folder, target, device_name, is_eagle3=True)
    assert network.body.embedding is shared
