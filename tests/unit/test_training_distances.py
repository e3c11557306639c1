"""What is minimised: cross-entropy, and the chance of a drawn draft."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from proposers.training.distances import distance

TEMPERATURE = 0.8


def example(missing: float = 0.1) -> tuple[Tensor, Tensor]:
    """Logits of a draft, and what the target makes of the same tokens. Args: missing: chance of all other tokens."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(7, 50, generator=generator).mul(2).softmax(-1) * (1 - missing)
    return torch.randn(7, 50, generator=generator), target


def test_without_weight_it_is_cross_entropy() -> None:
    logits, target = example()
    expected = functional.cross_entropy(logits / TEMPERATURE, target, reduction="none")
    torch.testing.assert_close(distance(logits, target, TEMPERATURE, 0), expected)


def test_the_weight_goes_to_the_chance_that_a_drawn_draft_is_kept() -> None:
    logits, target = example()
    draft = (logits / TEMPERATURE).softmax(-1)
    generator = torch.Generator().manual_seed(1)
    drawn = draft.multinomial(20_000, replacement=True, generator=generator)
    kept = (target.gather(1, drawn) / draft.gather(1, drawn)).clamp(max=1).mean(-1)
    chance = distance(logits, target, TEMPERATURE, 1).neg().exp()
    torch.testing.assert_close(chance, kept, rtol=0.03, atol=0)
    half = (distance(logits, target, TEMPERATURE, 0) + distance(logits, target, TEMPERATURE, 1)) / 2
    torch.testing.assert_close(distance(logits, target, TEMPERATURE, 0.5), half)


def test_the_target_itself_is_nearest() -> None:
    elsewhere, target = example(missing=0)
    logits = target.log() * TEMPERATURE
    nearest = distance(logits, target, TEMPERATURE, 1)
    torch.testing.assert_close(nearest, torch.zeros(7), rtol=0, atol=1e-5)
    assert (distance(logits + 0.1 * elsewhere, target, TEMPERATURE, 1) > nearest + 1e-3).all()


@pytest.mark.parametrize("weight", [0.5, 1])
def test_drafts_that_have_no_chance_have_a_finite_distance(weight: float) -> None:
    logits = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    found = distance(logits, torch.tensor([[0.0, 0.5, 0.5]]), TEMPERATURE, weight)
    found.sum().backward()
    assert found.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
