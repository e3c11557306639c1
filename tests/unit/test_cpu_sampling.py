"""The C++ operators that draw and verify, against their eager twins and what they are to be distributed like."""

import pytest
import torch
from torch import Tensor

from server.kernels import cpu_sampling, noise, rejection_reference
from server.kernels.rejection import Method
from server.model.cache import cache_root
from tests.fakes.drafted_chain import assert_drawn_from, chain, generate

NUM_ROWS = 100_000
METHODS = pytest.mark.parametrize("method", [Method.STANDARD, Method.BLOCK])


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    if not cpu_sampling.load(cache_root() / "kernels"):
        pytest.skip("no C++ compiler")


def test_uniform_numbers_are_the_twin_s() -> None:
    generator = torch.Generator().manual_seed(1)
    key, position = (torch.randint(-(2**63), 2**63 - 1, (500, 20), generator=generator) for _ in range(2))
    for stream in noise.Stream:
        assert torch.equal(cpu_sampling.uniform(key, position, stream), noise.uniform(key, position, stream))
    alike = key[:1, :1].expand(1, 20)
    expected = noise.uniform(alike, position[:1], noise.Stream.ACCEPT)
    assert torch.equal(cpu_sampling.uniform(alike, position[:1], noise.Stream.ACCEPT), expected)


@pytest.mark.parametrize("vocab_size", [1, 17, 5000])
def test_the_likeliest_is_the_twin_s(vocab_size: int) -> None:
    logits = torch.randn(9, 3, vocab_size, generator=torch.Generator().manual_seed(vocab_size)).bfloat16().float()
    logits[1], logits[2], logits[3, :, 0] = -torch.inf, torch.inf, torch.inf  # of equals, the first
    logits[4, 1, vocab_size // 2] = torch.nan
    ids, scores = cpu_sampling.argmax(logits)
    expected = logits.max(-1)
    torch.testing.assert_close(scores, expected.values, rtol=0, atol=0, equal_nan=True)
    is_number = ~scores.isnan()
    assert is_number.sum() == 26
    assert torch.equal(ids[is_number], torch.from_numpy(logits.numpy().argmax(-1))[is_number])
    assert ((ids >= 0) & (ids < vocab_size)).all()


@pytest.mark.parametrize("vocab_size", [1, 7, 16, 100, 8192, 49_153])
def test_draws_are_the_twin_s(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 4 * torch.randn(40, vocab_size, generator=generator)
    logits[::3, vocab_size // 2 + 1 :] = -torch.inf
    coins = torch.rand(40, generator=generator)
    coins[:4] = torch.tensor([0.0, 1 - 2.0**-24, 0.0, 1 - 2.0**-24])
    found, expected = cpu_sampling.draw(logits, coins), rejection_reference.draw(logits, coins)
    assert (logits.gather(1, found[:, None]) > -torch.inf).all()
    # Sums of another order differ in the last bits: a coin between two ids may fall to either.
    before = logits.softmax(-1).double().cumsum(-1)
    chosen, twin = before.gather(1, found[:, None])[:, 0], before.gather(1, expected[:, None])[:, 0]
    is_close = (found == expected) | ((torch.minimum(chosen, twin) - coins).abs() < 1e-5)
    assert is_close.all()


@METHODS
@pytest.mark.parametrize("is_one_hot", [True, False])
@pytest.mark.parametrize("is_reduced", [True, False])
@pytest.mark.parametrize("vocab_size", [19, 5000])
def test_verified_drafts_are_the_twin_s(method: Method, is_one_hot: bool, is_reduced: bool, vocab_size: int) -> None:
    num_rows, k = 300, 4
    generator = torch.Generator().manual_seed(vocab_size + method)
    target = 5 * torch.randn(num_rows, k + 1, vocab_size, generator=generator)
    known = torch.randperm(vocab_size, generator=generator)[: vocab_size // 2 if is_reduced else vocab_size]
    to_draft = torch.full((vocab_size,), -1, dtype=torch.int32)
    to_draft[known] = torch.arange(len(known), dtype=torch.int32)
    drafter = target[:, :k, known] + torch.randn(num_rows, k, len(known), generator=generator)
    drawn = rejection_reference.draw(drafter.flatten(0, 1), torch.rand(num_rows * k, generator=generator))
    ids = target[:, :k].argmax(-1) if is_one_hot else known[drawn].view(num_rows, k)
    counts = torch.arange(num_rows) % (k + 1)
    uniforms, coins = torch.rand(num_rows, k, generator=generator), torch.rand(num_rows, generator=generator)
    options = (None, None) if is_one_hot else (drafter, to_draft)
    kept, next_ids, scores = cpu_sampling.verify_drafts(target, ids, counts, uniforms, coins, method, *options)
    expected, weights = rejection_reference.verify_drafts(target, ids, counts, uniforms, method, *options)
    assert torch.equal(kept, expected)
    assert len(kept.unique()) > 2
    same = next_ids == rejection_reference.draw(weights, coins)
    assert same.float().mean() > 0.98  # the others' coins fell between two ids
    is_looked_at = torch.arange(k + 1) <= kept[:, None]
    torch.testing.assert_close(scores[is_looked_at], target.amax(-1)[is_looked_at], rtol=0, atol=0)


@METHODS
@pytest.mark.parametrize("is_one_hot", [True, False])
def test_the_target_s_distribution_is_kept(method: Method, is_one_hot: bool) -> None:
    """Drafts and the token behind them; that one is certain in what is handed on, and so drawn again as it is."""
    p, q = chain(1, "cpu"), chain(2, "cpu")
    if is_one_hot:
        q = torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1]).float()

    def verify(target: Tensor, ids: Tensor, counts: Tensor, uniforms: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        coins = torch.rand(len(ids), generator=torch.Generator().manual_seed(9))
        drawn_from = None if is_one_hot else drafts
        kept, next_ids, _ = cpu_sampling.verify_drafts(target, ids, counts, uniforms, coins, method, drawn_from)
        return kept, torch.nn.functional.one_hot(next_ids, target.shape[-1]).float().log()

    tokens, kept = generate(p, q, 3, NUM_ROWS, verify)
    assert_drawn_from(p, tokens)
    assert kept.sum() > NUM_ROWS / 10


@METHODS
def test_where_rounding_leaves_no_mass_the_target_decides(method: Method) -> None:
    """A rejected draft of a distribution that equals the target's."""
    target = torch.tensor([[[0.0, 0.0, -torch.inf]] * 2])
    drafts = target[:, :1]
    ids, counts = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    for coin, expected in ((0.25, 0), (0.75, 1)):
        coins, never = torch.tensor([coin]), torch.ones(1, 1)
        kept, next_ids, _ = cpu_sampling.verify_drafts(target, ids, counts, never, coins, method, drafts)
        assert (kept.tolist(), next_ids.tolist()) == ([0], [expected])


@METHODS
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_usable_logits_are_told_by_their_scores(method: Method, value: float) -> None:
    """And leave the others alone."""
    generator = torch.Generator().manual_seed(3)
    target, uniforms, coins = torch.randn(4, 3, 90, generator=generator), torch.zeros(4, 2), torch.full((4,), 0.5)
    ids, counts = torch.zeros(4, 2, dtype=torch.int64), torch.full((4,), 2)
    expected = cpu_sampling.verify_drafts(target, ids, counts, uniforms, coins, method)
    broken = target.clone()
    broken[1, 0, :] = value
    broken[2, 0, 5 if value == torch.inf else slice(None)] = value
    found = cpu_sampling.verify_drafts(broken, ids, counts, uniforms, coins, method)
    for some, others in zip(found, expected, strict=True):
        assert torch.equal(some[[0, 3]], others[[0, 3]])
    scores = found[2][1:3, 0]
    assert (scores == value).all() if value == -torch.inf else scores.isnan().all()
    assert ((found[1] >= 0) & (found[1] < 90)).all()


def test_ids_out_of_the_vocabulary_are_refused() -> None:
    target, uniforms, coins = torch.zeros(1, 2, 9), torch.zeros(1, 1), torch.zeros(1)
    ids, none, one = torch.tensor([[9]]), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    cpu_sampling.verify_drafts(target, ids, none, uniforms, coins, Method.STANDARD)  # beyond the count anything goes
    with pytest.raises(RuntimeError, match="draft 0 of row 0 is 9"):
        cpu_sampling.verify_drafts(target, ids, one, uniforms, coins, Method.STANDARD)
