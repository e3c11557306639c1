"""Verification in the sampler keeps the target's distribution over many steps, whatever was drafted.

The model is a Markov chain over 8 tokens: p(next | last) is fixed, and so is the drafter's q.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from proposers.base import DraftVocabulary
from server.kernels.rejection import Method
from server.worker.batch import BatchState
from server.worker.rejection import Acceptance, Drafts, RejectionRule, count_accepted
from server.worker.sampler import Chosen, Sampler
from server.worker.step_inputs import SamplingRows, Selection
from tests.fakes.drafted_chain import NUM_TOKENS, VOCAB, assert_drawn_from, chain

NUM_DRAWS = 200_000
Choose = Callable[[Tensor, Drafts | None, Tensor], Chosen]
"""(lengths [n], drafts, target logits) to what is chosen."""


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    level = torch.rand(probs.shape[0], 1, generator=generator, device=probs.device)
    return (probs.cumsum(1) <= level).sum(1).clamp(max=VOCAB - 1)


def generate(
    p: Tensor, q: Tensor, num_drafts: int, choose: Choose, generator: torch.Generator, *, shows_q: bool = False
) -> tuple[Tensor, Tensor]:
    """The first 3 tokens of each of many sequences that start with token 0, and [steps, n] the drafts kept.

    Row r has (r + step) % (num_drafts + 1) drafts in each step, so that short, full and empty ones meet.

    Args: shows_q: whether drafts come with the logits that they were drawn from.
    """
    device = p.device
    tokens = torch.zeros(NUM_DRAWS, 1 + NUM_TOKENS + num_drafts, dtype=torch.int64, device=device)
    lengths = torch.ones(NUM_DRAWS, dtype=torch.int64, device=device)
    rows = torch.arange(NUM_DRAWS, device=device)
    kept = []
    for step in range(NUM_TOKENS):
        context = [tokens[rows, lengths - 1]]
        for _ in range(num_drafts):
            context.append(draw(q[context[-1]], generator))
        drafts = None
        if num_drafts:
            logits = torch.stack([q[last] for last in context[:-1]], 1).log() if shows_q else None
            drafts = Drafts(torch.stack(context[1:], 1), (rows + step) % (num_drafts + 1), logits)
        chosen = choose(lengths, drafts, torch.stack([p[last] for last in context], 1).log())
        num_accepted = torch.zeros_like(rows) if chosen.num_accepted is None else chosen.num_accepted
        kept.append(num_accepted)
        for i in range(num_drafts + 1):
            is_new = (num_accepted >= i) & (lengths + i < tokens.shape[1])
            tokens[rows[is_new], lengths[is_new] + i] = chosen.ids[is_new, i]
        lengths = (lengths + num_accepted + 1).clamp(max=tokens.shape[1] - 1)
    return tokens[:, 1 : 1 + NUM_TOKENS], torch.stack(kept)


def sampler(
    device: str,
    num_drafts: int,
    *,
    is_seeded: bool = False,
    method: Method = Method.STANDARD,
    rates: tuple[float, ...] = (),
    shows_q: bool = False,
) -> Choose:
    """The sampler itself, on a batch of as many sequences; `shows_q`: drafts are drawn, not certain."""
    batch = BatchState(NUM_DRAWS, 16, 16, num_drafts, torch.device(device))
    for column in (batch.temperature, batch.noise, batch.top_p):
        column.fill_(1)
    batch.is_rejecting.fill_(not is_seeded)
    rows = torch.arange(NUM_DRAWS, device=device)
    batch.key[:NUM_DRAWS] = rows * 7919 + 13
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
        num_proposed=0,
        is_captured=True,
    )
    vocabulary = DraftVocabulary(VOCAB, torch.float32) if shows_q else None
    chooser = Sampler(batch, RejectionRule(Acceptance(method, rates), vocabulary, torch.device(device)))
    return lambda lengths, drafts, logits: chooser.choose(logits, sampling_rows, lengths, drafts)


@pytest.fixture
def generator(device_name: str) -> torch.Generator:
    """Of the drafts; the verification has noise of its own."""
    return torch.Generator(device_name).manual_seed(11)


@pytest.mark.parametrize("is_seeded", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_certain_drafts_keep_the_distribution(
    device_name: str, generator: torch.Generator, num_drafts: int, is_seeded: bool
) -> None:
    p, q = chain(3, device_name), chain(4, device_name)
    tokens, kept = generate(p, q, num_drafts, sampler(device_name, num_drafts, is_seeded=is_seeded), generator)
    assert_drawn_from(p, tokens)
    assert (kept.sum() > 0) == (num_drafts > 0)


@pytest.mark.parametrize("shows_q", [False, True])
@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("method", [Method.STANDARD, Method.BLOCK])
def test_rules_keep_the_distribution(
    device_name: str, generator: torch.Generator, method: Method, num_drafts: int, shows_q: bool
) -> None:
    p, q = chain(1, device_name), chain(2, device_name)
    if not shows_q:  # a drafter without randomness, which proposes one token after each
        q = torch.nn.functional.one_hot(q.argmax(-1), VOCAB).float()
    choose = sampler(device_name, num_drafts, method=method, shows_q=shows_q)
    tokens, kept = generate(p, q, num_drafts, choose, generator, shows_q=shows_q)
    assert_drawn_from(p, tokens)
    assert kept.sum() > NUM_DRAWS / 10


@pytest.mark.parametrize("method", [Method.STANDARD, Method.BLOCK])
def test_drafts_from_the_target_itself_are_all_kept(
    device_name: str, generator: torch.Generator, method: Method
) -> None:
    p = chain(8, device_name)
    num_drafts = 3
    choose = sampler(device_name, num_drafts, method=method, shows_q=True)
    tokens, kept = generate(p, p, num_drafts, choose, generator, shows_q=True)
    assert_drawn_from(p, tokens)
    rows = torch.arange(NUM_DRAWS, device=device_name)
    assert torch.equal(kept, torch.stack([(rows + step) % (num_drafts + 1) for step in range(NUM_TOKENS)]))


def test_blocks_keep_no_fewer_drafts(device_name: str) -> None:
    p, q = chain(1, device_name), chain(2, device_name)
    means = []
    for method in (Method.STANDARD, Method.BLOCK):
        choose = sampler(device_name, 4, method=method, shows_q=True)
        generator = torch.Generator(device_name).manual_seed(1)
        means.append(generate(p, q, 4, choose, generator, shows_q=True)[1].float().mean())
    assert means[1] > 1.01 * means[0]


def test_synthetic_rates_hold_for_rows_with_noise_and_no_seed(device_name: str, generator: torch.Generator) -> None:
    p, q = chain(1, device_name), chain(2, device_name)
    rates = (0.7, 0.4, 0.1)
    choose = sampler(device_name, 3, method=Method.SYNTHETIC, rates=rates)
    _, kept = generate(p, q, 3, choose, generator)
    rows = torch.arange(NUM_DRAWS, device=device_name)
    for step in range(NUM_TOKENS):
        full = kept[step][(rows + step) % 4 == 3]
        found = torch.stack([(full > i).float().mean() for i in range(3)])
        torch.testing.assert_close(found.cpu(), torch.tensor(rates), atol=0.01, rtol=0)
    seeded = sampler(device_name, 3, is_seeded=True, method=Method.SYNTHETIC, rates=rates)
    assert_drawn_from(p, generate(p, q, 3, seeded, generator)[0])


def test_seeded_tokens_do_not_depend_on_the_drafts(device_name: str, generator: torch.Generator) -> None:
    p = chain(5, device_name)
    runs = []
    for num_drafts, drafter in ((0, 6), (2, 6), (3, 7)):
        choose = sampler(device_name, num_drafts, is_seeded=True)
        runs.append(generate(p, chain(drafter, device_name), num_drafts, choose, generator)[0])
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_a_row_without_drafts_ignores_what_lies_beyond_its_count(device_name: str) -> None:
    targets = torch.tensor([[4, 5, 6], [4, 5, 6], [4, 5, 6]], device=device_name)
    drafts = torch.tensor([[4, 5], [4, 5], [4, 0]], device=device_name)
    assert count_accepted(drafts, torch.tensor([0, 1, 2], device=device_name), targets).tolist() == [0, 1, 1]
