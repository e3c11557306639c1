"""The rules of acceptance themselves, on their eager twin: what they keep, and how much of it."""

from functools import partial

import pytest
import torch
from torch import Tensor

from server.kernels.rejection import Method
from server.kernels.rejection_reference import verify_drafts
from tests.fakes.drafted_chain import VOCAB, assert_drawn_from, chain, generate

NUM_ROWS = 200_000


def verify(
    target: Tensor, ids: Tensor, counts: Tensor, uniforms: Tensor, drafts: Tensor, *, method: Method, is_one_hot: bool
) -> tuple[Tensor, Tensor]:
    """One rule, with the drafter's distribution or without."""
    return verify_drafts(target, ids, counts, uniforms, method, None if is_one_hot else drafts)


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("is_one_hot", [True, False])
@pytest.mark.parametrize("method", [Method.STANDARD, Method.BLOCK])
def test_the_target_s_distribution_is_kept(method: Method, is_one_hot: bool, num_drafts: int) -> None:
    p, q = chain(1, "cpu"), chain(2, "cpu")
    if is_one_hot:  # a drafter without randomness, which proposes one token after each
        q = torch.nn.functional.one_hot(p.argmax(-1), VOCAB).float()
    rule = partial(verify, method=method, is_one_hot=is_one_hot)
    tokens, kept = generate(p, q, num_drafts, NUM_ROWS, rule)
    assert_drawn_from(p, tokens)
    assert kept.sum() > NUM_ROWS / 10


def test_blocks_keep_no_fewer_drafts() -> None:
    p, q = chain(1, "cpu"), chain(2, "cpu")
    kept = [
        generate(p, q, 4, 50_000, partial(verify, method=method, is_one_hot=False))[1].float().mean()
        for method in (Method.STANDARD, Method.BLOCK)
    ]
    assert kept[1] > 1.01 * kept[0]


@pytest.mark.parametrize("method", [Method.STANDARD, Method.BLOCK])
def test_drafts_from_the_target_itself_are_all_kept(method: Method) -> None:
    p = chain(8, "cpu")
    tokens, kept = generate(p, p, 3, NUM_ROWS, partial(verify, method=method, is_one_hot=False))
    assert_drawn_from(p, tokens)
    assert torch.equal(kept, torch.arange(NUM_ROWS) % 4)


def test_synthetic_rates_are_those_of_each_position() -> None:
    rates = torch.tensor([0.8, 0.5, 0.1])
    uniforms = torch.rand(NUM_ROWS, 3, generator=torch.Generator().manual_seed(1))
    counts = torch.full((NUM_ROWS,), 3)
    target, ids = torch.zeros(1, 4, VOCAB).expand(NUM_ROWS, -1, -1), torch.zeros(NUM_ROWS, 3, dtype=torch.int64)
    kept, weights = verify_drafts(target, ids, counts, uniforms, Method.SYNTHETIC, rates=rates)
    found = torch.stack([(kept > i).float().mean() for i in range(3)])
    torch.testing.assert_close(found, rates, atol=0.005, rtol=0)
    torch.testing.assert_close(weights.exp(), torch.full_like(weights, 1 / VOCAB))


@pytest.mark.parametrize("method", [Method.STANDARD, Method.BLOCK])
def test_where_rounding_leaves_no_mass_the_target_decides(method: Method) -> None:
    """A rejected draft of a distribution that equals the target's."""
    target = torch.tensor([[[0.0, 0.0, -torch.inf]] * 2])
    drafts = torch.tensor([[[0.0, -1e-7, -torch.inf]]])
    ids, counts = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    never = torch.ones(1, 1)
    kept, weights = verify_drafts(target, ids, counts, never, method, drafts)
    assert kept.tolist() == [0]
    torch.testing.assert_close(weights.softmax(-1), torch.tensor([[0.5, 0.5, 0.0]]))
