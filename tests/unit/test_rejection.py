"""Verification keeps the target's distribution, whatever was drafted.

The model is a Markov chain over 8 tokens: p(next | last) is fixed, and so is the drafter's q.
"""

from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from server.worker.batch import BatchState
from server.worker.noise import Stream, gumbel, uniform
from server.worker.rejection import Verified, count_accepted, verify_standard
from server.worker.sampler import Drafts, Sampler
from server.worker.step_inputs import SamplingRows, Selection

VOCAB = 8
NUM_DRAWS = 200_000
NUM_TOKENS = 3
SIGNIFICANCE = 1e-4
Verify = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Verified]
"""(known tokens [n] so far, draft ids, counts, p, q, keys) to what is kept."""


def chain(seed: int, device: str) -> Tensor:
    """[8, 8] float32 transition probabilities; each row has one token of probability 0."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(VOCAB, VOCAB, generator=generator) ** 2
    probs[torch.arange(VOCAB), (torch.arange(VOCAB) * 3 + seed) % VOCAB] = 0
    return (probs / probs.sum(1, keepdim=True)).to(device)


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    level = torch.rand(probs.shape[0], 1, generator=generator, device=probs.device)
    return (probs.cumsum(1) <= level).sum(1).clamp(max=VOCAB - 1)


def generate(
    p: Tensor, q: Tensor, num_drafts: int, verify: Verify, generator: torch.Generator, keys: Tensor
) -> tuple[Tensor, int]:
    """The first 3 tokens of each of many sequences that start with token 0, and the drafts accepted in all.

    Row r has (r + step) % (num_drafts + 1) drafts in each step, so that short, full and empty ones meet.
    """
    device = p.device
    tokens = torch.zeros(NUM_DRAWS, 1 + NUM_TOKENS + num_drafts, dtype=torch.int64, device=device)
    lengths = torch.ones(NUM_DRAWS, dtype=torch.int64, device=device)
    rows = torch.arange(NUM_DRAWS, device=device)
    num_accepted = 0
    for step in range(NUM_TOKENS):
        context = [tokens[rows, lengths - 1]]
        for _ in range(num_drafts):
            context.append(draw(q[context[-1]], generator))
        draft_ids = torch.stack(context[1:], 1) if num_drafts else rows.new_empty(NUM_DRAWS, 0)
        counts = (rows + step) % (num_drafts + 1)
        target_probs = torch.stack([p[last] for last in context], 1)
        draft_probs = torch.stack([q[last] for last in context[:-1]], 1) if num_drafts else target_probs[:, :0]
        verified = verify(lengths, draft_ids, counts, target_probs, draft_probs, keys)
        num_accepted += int(verified.num_accepted.sum())
        new = torch.cat((draft_ids, rows[:, None]), 1)
        new.scatter_(1, verified.num_accepted[:, None], verified.next_ids[:, None])
        for i in range(num_drafts + 1):
            is_new = (verified.num_accepted >= i) & (lengths + i < tokens.shape[1])
            tokens[rows[is_new], lengths[is_new] + i] = new[is_new, i]
        lengths = (lengths + verified.num_accepted + 1).clamp(max=tokens.shape[1] - 1)
    return tokens[:, 1 : 1 + NUM_TOKENS], num_accepted


def assert_drawn_from(p: Tensor, tokens: Tensor) -> None:
    """Joint chi-square of 3 tokens against p; tokens of probability 0 must not occur at all."""
    p = p.double().cpu()
    joint = (p[0][:, None, None] * p[:, :, None] * p[None]).flatten()
    cells = (tokens[:, 0] * VOCAB + tokens[:, 1]) * VOCAB + tokens[:, 2]
    counts = torch.bincount(cells.cpu(), minlength=VOCAB**NUM_TOKENS).double()
    assert counts[joint == 0].sum() == 0
    expected = joint / joint.sum() * NUM_DRAWS
    # Cells too rare for a test of their own share one.
    cell = torch.where(expected < 5, 0, 1 + torch.arange(joint.numel()))
    observed, wanted = (torch.zeros(1 + joint.numel()).double().index_add_(0, cell, v) for v in (counts, expected))
    is_used = wanted > 0
    assert stats.chisquare(observed[is_used].numpy(), wanted[is_used].numpy()).pvalue > SIGNIFICANCE


def standard(*, is_one_hot: bool) -> Verify:
    """Rejection with the noise that the sampler takes."""

    def verify(lengths: Tensor, draft_ids: Tensor, counts: Tensor, p: Tensor, q: Tensor, keys: Tensor) -> Verified:
        positions = lengths[:, None] + torch.arange(1, p.shape[1], device=p.device)
        uniforms = uniform(keys[:, None].expand_as(positions), positions, Stream.ACCEPT)
        noise = gumbel(keys, lengths, Stream.RESAMPLE, VOCAB)
        return verify_standard(draft_ids, counts, None if is_one_hot else q, p, uniforms, noise)

    return verify


def through_sampler(device: str, num_drafts: int, *, is_seeded: bool) -> Verify:
    """The sampler itself, on logits; it takes drafts as one-hot."""
    batch = BatchState(NUM_DRAWS, 16, 16, num_drafts, torch.device(device))
    batch.temperature.fill_(1)
    batch.noise.fill_(1)
    batch.top_p.fill_(1)
    rows = torch.arange(NUM_DRAWS, device=device)
    everyone = Selection((), rows, is_all=True)
    sampling_rows = SamplingRows(
        rows=(),
        infos=(),
        slots=rows,
        max_drafts=rows,
        num_new=rows,
        tokens=None,
        num_positions=1 + num_drafts,
        coupled=everyone if is_seeded or not num_drafts else None,
        rejecting=everyone if not is_seeded and num_drafts else None,
        penalised=None,
        reporting=None,
        is_drafting=False,
        is_captured=True,
    )
    sampler = Sampler(batch)

    def verify(lengths: Tensor, draft_ids: Tensor, counts: Tensor, p: Tensor, q: Tensor, keys: Tensor) -> Verified:
        batch.key[:NUM_DRAWS] = keys
        chosen, _ = sampler.choose(p.log(), sampling_rows, lengths, Drafts(draft_ids, counts) if num_drafts else None)
        accepted = count_accepted(draft_ids, counts, chosen)
        return Verified(accepted, chosen.gather(1, accepted[:, None])[:, 0])

    return verify


@pytest.fixture
def generator(device_name: str) -> torch.Generator:
    """Of the drafts; the verification has noise of its own."""
    return torch.Generator(device_name).manual_seed(11)


@pytest.fixture
def keys(device_name: str) -> Tensor:
    """One for each sequence, as many seeds would give."""
    return torch.arange(NUM_DRAWS, device=device_name) * 7919 + 13


@pytest.mark.parametrize("num_drafts", [1, 2, 4])
@pytest.mark.parametrize("is_one_hot", [True, False])
def test_standard_verification_keeps_the_distribution(
    device_name: str, generator: torch.Generator, keys: Tensor, num_drafts: int, is_one_hot: bool
) -> None:
    p, q = chain(1, device_name), chain(2, device_name)
    if is_one_hot:  # a drafter without randomness, which proposes one token after each
        q = torch.nn.functional.one_hot(q.argmax(-1), VOCAB).float()
    tokens, num_accepted = generate(p, q, num_drafts, standard(is_one_hot=is_one_hot), generator, keys)
    assert_drawn_from(p, tokens)
    assert num_accepted > NUM_DRAWS / 10


@pytest.mark.parametrize("is_seeded", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_the_sampler_keeps_the_distribution(
    device_name: str, generator: torch.Generator, keys: Tensor, num_drafts: int, is_seeded: bool
) -> None:
    p, q = chain(3, device_name), chain(4, device_name)
    verify = through_sampler(device_name, num_drafts, is_seeded=is_seeded)
    tokens, num_accepted = generate(p, q, num_drafts, verify, generator, keys)
    assert_drawn_from(p, tokens)
    assert (num_accepted > 0) == (num_drafts > 0)


def test_seeded_tokens_do_not_depend_on_the_drafts(device_name: str, generator: torch.Generator, keys: Tensor) -> None:
    p = chain(5, device_name)
    runs = []
    for num_drafts, drafter in ((0, 6), (2, 6), (3, 7)):
        verify = through_sampler(device_name, num_drafts, is_seeded=True)
        runs.append(generate(p, chain(drafter, device_name), num_drafts, verify, generator, keys)[0])
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_drafts_from_the_target_itself_are_all_accepted(
    device_name: str, generator: torch.Generator, keys: Tensor
) -> None:
    p = chain(8, device_name)
    num_drafts = 3
    tokens, num_accepted = generate(p, p, num_drafts, standard(is_one_hot=False), generator, keys)
    assert_drawn_from(p, tokens)
    rows = torch.arange(NUM_DRAWS)
    assert num_accepted == sum(int(((rows + step) % (num_drafts + 1)).sum()) for step in range(NUM_TOKENS))


def test_a_row_without_drafts_ignores_what_lies_beyond_its_count(device_name: str) -> None:
    targets = torch.tensor([[4, 5, 6], [4, 5, 6], [4, 5, 6]], device=device_name)
    drafts = torch.tensor([[4, 5], [4, 5], [4, 0]], device=device_name)
    assert count_accepted(drafts, torch.tensor([0, 1, 2], device=device_name), targets).tolist() == [0, 1, 1]


def test_the_residual_is_left_out_where_rounding_leaves_no_mass(device_name: str) -> None:
    """A rejected draft of a distribution that equals the target's: the draw comes from the target."""
    p = torch.tensor([[[0.5, 0.5, 0.0]] * 2], device=device_name)
    never = torch.full((1, 1), 1 - 2.0**-24, device=device_name)
    q = torch.tensor([[[0.5 + 1e-6, 0.5, 0.0]]], device=device_name)
    noise = torch.tensor([[0.0, 1.0, 50.0]], device=device_name)
    drafts, counts = torch.zeros(1, 1, dtype=torch.int64, device=device_name), torch.ones(1, device=device_name).long()
    verified = verify_standard(drafts, counts, q, p, never, noise)
    assert verified.num_accepted.tolist() == [0]
    assert verified.next_ids.tolist() == [1]
