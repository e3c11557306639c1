"""Medusa heads: their forms, what they compute, and what is drafted from it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from proposers.base import DraftSampling, ProposeInput, TargetView
from proposers.checkpoint import Checkpoint, read_checkpoint
from proposers.medusa import MedusaConfig, MedusaProposer
from proposers.medusa_heads import MedusaHeads, medusa_heads
from server.errors import ConfigError, ModelError
from server.kernels.noise import Stream, gumbel
from tests.fakes.tiny_target import target_outline, target_view
from tests.tiny_heads import HIDDEN, VOCAB, build_tiny_medusa
from tests.tiny_model import build_tiny_model

KNOWN = [*range(400, 440), *range(3, 40)]
ROWS = 5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, device_name: str) -> TargetView:
    return target_view(build_tiny_model(tmp_path_factory.mktemp("target")), device_name)


def load(checkpoint: Checkpoint, target: TargetView) -> MedusaHeads:
    assert target.network is not None
    return medusa_heads(checkpoint, target.network, target.device)


def proposer_on(folder: Path, target: TargetView, **settings: Any) -> MedusaProposer:
    return settings_of(folder, **settings).build(target)


def settings_of(folder: Path, **settings: Any) -> MedusaConfig:
    return MedusaConfig(method="medusa", model=str(folder), **{"num_speculative_tokens": 3, **settings})


def hidden_states(target: TargetView) -> Tensor:
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(2)).to(target.device)


def written_out(tensors: Mapping[str, Tensor], hidden: Tensor, head: int, num_layers: int) -> Tensor:
    """The state that a head's output projection takes, from the first publication's names."""
    for layer in range(num_layers):
        weight, bias = (tensors[f"{head}.{layer}.linear.{part}"].to(hidden.device) for part in ("weight", "bias"))
        hidden = hidden + functional.silu(hidden @ weight.T + bias)
    return hidden


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("runs_plain", [False, True])
@torch.inference_mode()
def test_logits_are_those_of_residual_blocks(
    tmp_path: Path, target: TargetView, num_layers: int, runs_plain: bool
) -> None:
    assert target.network is not None
    target = replace(target, network=replace(target.network, runs_plain=runs_plain))
    checkpoint = read_checkpoint(str(build_tiny_medusa(tmp_path, num_layers=num_layers)))
    heads, hidden = load(checkpoint, target), hidden_states(target)
    assert (heads.num_heads, heads.vocab_size, heads.to_target) == (3, VOCAB, None)
    got = heads.logits(hidden, 2)
    assert (got.shape, got.dtype) == ((ROWS, 2, VOCAB), torch.float32)
    for head in range(2):
        output = checkpoint.tensors[f"{head}.{num_layers}.weight"].to(hidden.device)
        expected = written_out(checkpoint.tensors, hidden, head, num_layers) @ output.T
        torch.testing.assert_close(got[:, head], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"form": "vllm"},
        {"form": "vllm", "file": "model.safetensors"},
        {"form": "vllm", "prefix": "medusa_heads.", "file": "pytorch_model.bin"},
        {"prefix": "medusa_head.", "file": "medusa_lm_head.safetensors"},
    ],
    ids=str,
)
@torch.inference_mode()
def test_all_forms_come_to_the_same(tmp_path: Path, target: TargetView, options: dict[str, Any]) -> None:
    hidden = hidden_states(target)
    expected = load(read_checkpoint(str(build_tiny_medusa(tmp_path / "a"))), target).logits(hidden, 3)
    got = load(read_checkpoint(str(build_tiny_medusa(tmp_path / "b", **options))), target).logits(hidden, 3)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("token_map", [None, KNOWN])
@pytest.mark.parametrize("output", ["one", "target"])
@torch.inference_mode()
def test_one_output_projection_for_all_heads(
    tmp_path: Path, target: TargetView, output: Any, token_map: list[int] | None
) -> None:
    assert target.network is not None
    checkpoint = read_checkpoint(str(build_tiny_medusa(tmp_path, output=output, token_map=token_map)))
    heads, hidden = load(checkpoint, target), hidden_states(target)
    shared = checkpoint.tensors["lm_head.weight"] if output == "one" else target.network.head.weight
    rows = torch.arange(VOCAB) if token_map is None else torch.tensor(token_map)
    expected = written_out(checkpoint.tensors, hidden, 1, 1) @ shared.to(hidden.device)[rows.to(hidden.device)].T
    torch.testing.assert_close(heads.logits(hidden, 3)[:, 1], expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_vllm_s_own_way_to_share_an_output_projection(tmp_path: Path, target: TargetView) -> None:
    checkpoint = read_checkpoint(str(build_tiny_medusa(tmp_path, form="vllm")))
    hidden = hidden_states(target)
    shared = load(replace(checkpoint, config={**checkpoint.config, "original_lm_head": True}), target)
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if not name.startswith("lm_heads")}
    tensors["lm_head.weight"] = checkpoint.tensors["lm_heads.0.weight"]
    assert torch.equal(shared.logits(hidden, 3), load(replace(checkpoint, tensors=tensors), target).logits(hidden, 3))


def test_heads_are_counted_in_the_weights(tmp_path: Path, target: TargetView) -> None:
    checkpoint = read_checkpoint(str(build_tiny_medusa(tmp_path, num_heads=4)))
    config = {**checkpoint.config, "medusa_num_heads": 2}
    assert load(replace(checkpoint, config=config), target).num_heads == 4


Change = Callable[[dict[str, Any], dict[str, Tensor]], object]
REFUSALS: list[tuple[Change, str]] = [
    (lambda _, tensors: tensors.clear(), "has no Medusa heads"),
    (lambda config, _: config.update(hidden_size=32), "its hidden size is 32, and the target's is 64"),
    (lambda config, _: config.update(vocab_size=99), "its vocabulary is 99, and the target's is 512"),
    (lambda _, tensors: tensors.pop("1.0.linear.weight"), r"lacks weights .*: blocks.1.layers.0.weight"),
    (lambda _, tensors: tensors.pop("2.1.weight"), r"lacks weights .*: lm_heads.2.weight"),
    (lambda _, tensors: tensors.update(other=torch.ones(1)), r"does not call for: other"),
    (
        lambda _, tensors: tensors.update({"0.1.weight": torch.ones(9, HIDDEN)}),
        r"lm_heads.0.weight has the shape \[9, 64\], .* calls for \[512, 64\]",
    ),
    (lambda _, tensors: tensors.update(token_map=torch.tensor([4, 4])), "token_map has ids twice"),
    (lambda _, tensors: tensors.update(token_map=torch.tensor([VOCAB])), "out of the vocabulary of 512"),
    (
        lambda config, tensors: (tensors.update(token_map=torch.tensor([4])), config.update(truncated_vocab_size=2)),
        r"token_map has the shape \[1\], and truncated_vocab_size is 2",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_what_does_not_fit_is_named(tmp_path: Path, target: TargetView, change: Change, message: str) -> None:
    checkpoint = read_checkpoint(str(build_tiny_medusa(tmp_path)))
    config, tensors = dict(checkpoint.config), dict(checkpoint.tensors)
    change(config, tensors)
    with pytest.raises(ModelError, match=message) as caught:
        load(replace(checkpoint, config=config, tensors=tensors), target)
    assert str(tmp_path) in str(caught.value)


def test_more_drafts_than_heads_are_refused(tmp_path: Path, target: TargetView) -> None:
    with pytest.raises(ConfigError, match=r"num_speculative_tokens: must be at most 3, the number of heads .* got 4"):
        settings_of(build_tiny_medusa(tmp_path), num_speculative_tokens=4).check(target_outline(target))


def inputs_on(target: TargetView, hidden: Tensor, **fields: Any) -> ProposeInput:
    device = target.device
    defaults: dict[str, Any] = {
        "token_ids": torch.zeros(ROWS, 32, dtype=torch.int32, device=device),
        "slots": torch.arange(ROWS, device=device),
        "num_tokens": torch.arange(10, 10 + ROWS, device=device),
        "max_drafts": torch.tensor([3, 0, 2, 3, 3], dtype=torch.int32, device=device),
        "max_num_tokens": 20,
        "hidden": hidden,
    }
    return ProposeInput(**(defaults | fields))


def sampling_on(target: TargetView, *, has_unseeded: bool = True) -> DraftSampling:
    device = target.device
    return DraftSampling(
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.0, 0.9], device=device),
        key=torch.arange(100, 100 + ROWS, device=device),
        is_seeded=torch.tensor([True, True, True, not has_unseeded, True], device=device),
        has_seeded=True,
        has_unseeded=has_unseeded,
    )


@pytest.mark.parametrize("token_map", [None, KNOWN])
@torch.inference_mode()
def test_greedy_drafts_are_the_likeliest(tmp_path: Path, target: TargetView, token_map: list[int] | None) -> None:
    folder = build_tiny_medusa(tmp_path, token_map=token_map)
    proposer = proposer_on(folder, target, draft_sample_method="greedy")
    assert (proposer.vocabulary, proposer.needs_hidden, proposer.runs_on_device) == (None, True, True)
    hidden = hidden_states(target)
    hidden[4] = torch.nan
    draft = proposer.propose(inputs_on(target, hidden, sampling=sampling_on(target)))
    best = load(read_checkpoint(str(folder)), target).logits(hidden, 3).argmax(-1)
    expected = best if token_map is None else torch.tensor(token_map, device=target.device)[best]
    assert draft.logits is None
    assert draft.counts.tolist() == [3, 0, 2, 3, 0]
    for row, count in enumerate(draft.counts.tolist()):
        assert draft.ids[row].tolist() == expected[row, :count].tolist() + [-1] * (3 - count)
    fewer = proposer.propose(inputs_on(target, hidden, num_proposed=1))
    assert fewer.ids[:, 0].tolist() == [expected[0, 0], -1, expected[2, 0], expected[3, 0], -1]
    assert fewer.counts.tolist() == [1, 0, 1, 1, 0]


@pytest.mark.parametrize("token_map", [None, KNOWN])
@torch.inference_mode()
def test_each_head_is_drawn_from(tmp_path: Path, target: TargetView, token_map: list[int] | None) -> None:
    """Seeded rows by the target's noise at the draft's place; and what is drawn from is told."""
    folder = build_tiny_medusa(tmp_path, token_map=token_map)
    proposer, hidden, sampling = proposer_on(folder, target), hidden_states(target), sampling_on(target)
    known = torch.arange(VOCAB) if token_map is None else torch.tensor(token_map)
    assert proposer.vocabulary is not None
    assert proposer.vocabulary.size == len(known)
    if proposer.vocabulary.to_draft is not None:
        to_draft = proposer.vocabulary.to_draft.tolist()
        assert {token_id: own for token_id, own in enumerate(to_draft) if own >= 0} == {
            int(token_id): own for own, token_id in enumerate(known)
        }
    draft = proposer.propose(inputs_on(target, hidden, sampling=sampling))
    logits = load(read_checkpoint(str(folder)), target).logits(hidden, 3)
    temperature = torch.where(sampling.temperature > 0, sampling.temperature, 1.0)
    assert draft.logits is not None
    torch.testing.assert_close(draft.logits, logits / temperature[:, None, None], rtol=1e-5, atol=1e-5)
    for row in (0, 2, 4):
        for index in range(int(draft.counts[row])):
            scores = draft.logits[row, index]
            if sampling.temperature[row]:
                key, position = sampling.key[row], torch.tensor(10 + row + index, device=target.device)
                scores = scores + gumbel(key, position, Stream.TARGET, VOCAB)[known.to(target.device)]
            assert int(draft.ids[row, index]) == int(known[int(scores.argmax())])
    assert set(draft.ids[3].tolist()) <= set(known.tolist())


@torch.inference_mode()
def test_what_is_drawn_follows_the_distribution(tmp_path: Path, target: TargetView) -> None:
    proposer = proposer_on(build_tiny_medusa(tmp_path, token_map=KNOWN[:6]), target)
    num_draws, device = 20_000, target.device
    inputs = ProposeInput(
        token_ids=torch.zeros(1, 32, dtype=torch.int32, device=device),
        slots=torch.zeros(num_draws, dtype=torch.int64, device=device),
        num_tokens=torch.full((num_draws,), 10, device=device),
        max_drafts=torch.full((num_draws,), 3, dtype=torch.int32, device=device),
        max_num_tokens=20,
        hidden=(0.05 * hidden_states(target)[:1]).expand(num_draws, HIDDEN),
        sampling=DraftSampling(
            temperature=torch.ones(num_draws, device=device),
            key=torch.arange(num_draws, device=device),
            is_seeded=torch.zeros(num_draws, dtype=torch.bool, device=device),
            has_seeded=False,
            has_unseeded=True,
        ),
    )
    draft = proposer.propose(inputs)
    assert draft.logits is not None
    for index in range(3):
        expected = draft.logits[0, index].softmax(-1)
        for own, token_id in enumerate(KNOWN[:6]):
            share = float((draft.ids[:, index] == token_id).float().mean())
            assert share == pytest.approx(float(expected[own]), abs=4 * 0.5 / num_draws**0.5)


@torch.inference_mode()
def test_logits_are_kept_only_for_rows_that_need_them(tmp_path: Path, target: TargetView) -> None:
    proposer = proposer_on(build_tiny_medusa(tmp_path), target)
    sampling = sampling_on(target, has_unseeded=False)
    assert proposer.propose(inputs_on(target, hidden_states(target), sampling=sampling)).logits is None


@torch.inference_mode()
def test_nothing_is_drafted_beyond_a_limit(tmp_path: Path, target: TargetView) -> None:
    proposer = proposer_on(build_tiny_medusa(tmp_path), target, max_model_len=13)
    draft = proposer.propose(inputs_on(target, hidden_states(target)))
    assert draft.counts.tolist() == [3, 0, 1, 0, 0]
