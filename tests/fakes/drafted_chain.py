"""A model and a drafter small enough to know every probability: Markov chains over 8 tokens."""

from collections.abc import Callable

import torch
from scipy import stats
from torch import Tensor

from server.kernels.gumbel_argmax import gumbel_argmax
from server.kernels.noise import Stream, gumbel

VOCAB = 8
NUM_TOKENS = 3
SIGNIFICANCE = 1e-4
Verify = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(target logits, draft ids, counts, uniforms, draft logits) to drafts kept and log weights; see verify_drafts."""


def chain(seed: int, device: str) -> Tensor:
    """[8, 8] float32 transition probabilities; each row has one token of probability 0."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(VOCAB, VOCAB, generator=generator) ** 2
    probs[torch.arange(VOCAB), (torch.arange(VOCAB) * 3 + seed) % VOCAB] = 0
    return (probs / probs.sum(1, keepdim=True)).to(device)


def draw(weights: Tensor, step: int) -> Tensor:
    """One token for each row of log weights; the noise is that of the row and the step."""
    key = torch.arange(weights.shape[0], device=weights.device)
    position = torch.full_like(key, step)
    if weights.device.type == "cuda":
        chosen: Tensor = gumbel_argmax(weights[:, None], key, position, key.float() * 0 + 1, Stream.RESAMPLE)[0][:, 0]
        return chosen
    return (weights + gumbel(key, position, Stream.RESAMPLE, weights.shape[1])).argmax(-1)


def generate(p: Tensor, q: Tensor, num_drafts: int, num_rows: int, verify: Verify) -> tuple[Tensor, Tensor]:
    """The first 3 tokens of sequences that start with token 0: one verification, the rest drawn from p.

    Row r has r % (num_drafts + 1) drafts. Returns: [num_rows, 3]; [num_rows], drafts kept.
    """
    rows = torch.arange(num_rows, device=p.device)
    context = [torch.zeros_like(rows)]
    for step in range(num_drafts):
        context.append(draw(q[context[-1]].log(), step))
    counts = rows % (num_drafts + 1)
    targets, drafts = (torch.stack([chances[last] for last in context], 1).log() for chances in (p, q))
    uniforms = torch.rand(num_rows, num_drafts, generator=torch.Generator(p.device).manual_seed(5), device=p.device)
    draft_ids = torch.stack([*context[1:], rows * 0], 1)
    kept, weights = verify(
        targets, draft_ids[:, :num_drafts].contiguous(), counts, uniforms.clamp(min=1e-9), drafts[:, :num_drafts]
    )
    draft_ids.scatter_(1, kept[:, None], draw(weights, num_drafts)[:, None])
    last, tokens = rows * 0, []
    for step in range(NUM_TOKENS):
        drawn = draw(p[last].log(), num_drafts + 1 + step)
        last = torch.where(step <= kept, draft_ids[:, min(step, num_drafts)], drawn)
        tokens.append(last)
    return torch.stack(tokens, 1), kept


def assert_drawn_from(p: Tensor, tokens: Tensor) -> None:
    """Joint chi-square of 3 tokens against p; tokens of probability 0 must not occur at all."""
    p = p.double().cpu()
    joint = (p[0][:, None, None] * p[:, :, None] * p[None]).flatten()
    cells = (tokens[:, 0] * VOCAB + tokens[:, 1]) * VOCAB + tokens[:, 2]
    counts = torch.bincount(cells.cpu(), minlength=VOCAB**NUM_TOKENS).double()
    assert counts[joint == 0].sum() == 0
    expected = joint / joint.sum() * tokens.shape[0]
    # Cells too rare for a test of their own share one.
    cell = torch.where(expected < 5, 0, 1 + torch.arange(joint.numel()))
    observed, wanted = (torch.zeros(1 + joint.numel()).double().index_add_(0, cell, v) for v in (counts, expected))
    is_used = wanted > 0
    assert stats.chisquare(observed[is_used].numpy(), wanted[is_used].numpy()).pvalue > SIGNIFICANCE
