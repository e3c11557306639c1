"""A head unrolled over a text in training computes what it computes in a server, draft by draft."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from proposers.base import TargetModel
from proposers.checkpoint import read_checkpoint
from proposers.eagle_checkpoint import eagle_head
from proposers.eagle_network import EagleNetwork
from proposers.training.eagle_trainee import load_eagle
from proposers.training.export import export_head
from proposers.training.packing import pack
from proposers.training.target import TargetFeatures, Wanted, default_taps
from tests.fakes.paged_steps import block_table, step_over
from tests.fakes.training import TAPS, VOCAB, random_eagle, random_texts, tiny_target

BLOCK, PASSES = 16, 4
LENGTHS = (21, 30, 9, 17)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, device_name: str) -> TargetModel:
    return tiny_target(tmp_path_factory.mktemp("target"), device_name)


def served_drafts(network: EagleNetwork, token_ids: Tensor, features: Tensor, newest: int) -> list[Tensor]:
    """Logits of drafts behind the token `newest`, where each draft is the text's own token."""
    device = token_ids.device
    shape = network.kv_shape
    kv = torch.zeros(4, shape.num_layers, shape.num_kv_heads, BLOCK, 2 * shape.head_dim, device=device)
    network.bind_kv(kv)
    table = block_table(1, 3).to(device)
    step = step_over([(0, 1, newest)], table, BLOCK, first=1)
    given = network.condense(features[:newest])
    hidden = network.forward(token_ids[1 : newest + 1], step.positions, step, given)[-1:]
    logits = [network.logits(hidden)[0]]
    for place in range(newest + 1, newest + PASSES):
        step = step_over([(0, place, 1)], table, BLOCK, first=1)
        hidden = network.forward(token_ids[place : place + 1], step.positions, step, hidden)
        logits.append(network.logits(hidden)[0])
    return logits


@pytest.mark.parametrize(
    "options",
    [{}, {"feeds_normed": True}, {"has_own_output": False}],
    ids=["own output", "normed", "the target's output"],
)
@torch.no_grad()
def test_unrolled_equals_served(tmp_path: Path, target: TargetModel, options: dict[str, Any]) -> None:
    device = target.model.device
    to_target = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:200]
    trainee = random_eagle(target, to_target, **options)
    export_head(trainee, target, tmp_path)
    # The weights as they were written, in float16, for both.
    trainee = load_eagle(read_checkpoint(str(tmp_path)), target)
    head = eagle_head(read_checkpoint(str(tmp_path)), target, "eagle3")
    network = EagleNetwork(head, target, device, torch.float32)
    assert network.to_target is not None
    assert network.to_target.tolist() == to_target.tolist()

    texts = random_texts(LENGTHS)
    rows, places = pack(texts, 40)
    assert rows.num_rows < len(texts), "some texts share a row"
    rows = rows.to(device)
    features = TargetFeatures(target, Wanted(TAPS, 0.8)).compute(rows)
    unrolled = [trainee.logits(made) for made in trainee.unroll(rows, features, PASSES)]
    for place in places:
        length = LENGTHS[place.text]
        here = slice(place.column, place.column + length)
        token_ids, taps = rows.token_ids[place.row, here], features.taps[place.row, here]
        for newest in (1, 4, length - PASSES):
            served = served_drafts(network, token_ids, taps, newest)
            for index, expected in enumerate(served):
                got = unrolled[index][place.row, place.column + newest + index]
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_texts_in_one_row_do_not_see_each_other(target: TargetModel) -> None:
    texts = random_texts((12, 12))
    rows, places = pack(texts, 24)
    alone, _ = pack(texts[1:], 24)
    (place,) = [place for place in places if place.text == 1]
    assert (rows.num_rows, place.column) == (1, 12)
    trainee = random_eagle(target, torch.arange(200))
    features = TargetFeatures(target, Wanted(TAPS, 0.8))
    beside, by_itself = (
        (features.compute(each), trainee.unroll(each, features.compute(each), PASSES))
        for each in (rows.to(target.model.device), alone.to(target.model.device))
    )
    torch.testing.assert_close(beside[0].taps[0, 12:24], by_itself[0].taps[0, :12], rtol=1e-4, atol=1e-4)
    for index, (got, expected) in enumerate(zip(beside[1], by_itself[1], strict=True)):
        torch.testing.assert_close(got[0, 13 + index : 24], expected[0, 1 + index : 12], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("num_layers", "taps"), [(30, (3, 15, 28)), (32, (3, 16, 30)), (3, (0, 1, 2)), (2, (0, 1)), (1, (0,))]
)
def test_taps_are_low_middle_and_high(num_layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(num_layers) == taps
