"""How drafts are drawn: by a softmax and coins of their own, or by the target's noise; in tensors and by kernels."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from scipy import stats
from torch import Tensor

from proposers.base import DraftSampling
from proposers.draft_sampling import Draws
from server.kernels.gumbel_argmax import gumbel_argmax
from server.kernels.noise import Stream, gumbel

VOCAB = 6
NUM_ROWS = 30_000
SIGNIFICANCE = 1e-4


@dataclass(frozen=True)
class Draw:
    """Draws by one of their implementations, with its results on the CPU.

    Attributes:
        sample: takes the kernel's place; None for the path without kernels.
    """

    device: str
    sample: Callable[..., tuple[Tensor, Tensor]] | None

    def __call__(
        self, logits: Tensor, sampling: DraftSampling, num_tokens: Tensor, index: int, to_target: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        placed = replace(
            sampling,
            temperature=sampling.temperature.to(self.device),
            key=sampling.key.to(self.device),
            is_seeded=sampling.is_seeded.to(self.device),
        )
        known = None if to_target is None else to_target.to(self.device)
        with (
            patch("proposers.draft_sampling.jit.is_available", lambda _: self.sample is not None),
            patch("proposers.draft_sampling.gumbel_argmax", self.sample),
        ):
            drawn = Draws(placed, num_tokens.to(self.device), known).draw(logits.to(self.device), index)
        return drawn.ids.cpu(), drawn.logits.cpu()


def twin_of_kernel(
    logits: Tensor, key: Tensor, position: Tensor, noise: Tensor, stream: Stream, noise_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The interpreter takes too long for many rows; tests/unit/test_triton_gumbel_argmax.py has them compared."""
    assert logits.shape[1] == 1
    vocabulary = logits.shape[2] if noise_ids is None else noise_ids
    scores = logits + gumbel(key[:, None], position[:, None], stream, vocabulary)
    scores = torch.where(noise[:, None, None] > 0, scores, logits)
    return scores.argmax(-1), scores.amax(-1)


@pytest.fixture(params=["tensors", "kernels"])
def drawn(request: pytest.FixtureRequest, device_name: str) -> Draw:
    if request.param == "tensors":
        return Draw("cpu", None)
    return Draw(device_name, twin_of_kernel if device_name == "cpu" else gumbel_argmax)


def rows(num_rows: int, temperature: float, *, is_seeded: bool) -> tuple[Tensor, DraftSampling, Tensor]:
    """Rows with the same logits, keys of their own, at positions all over; one token cannot come."""
    logits = 1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(2)).expand(num_rows, VOCAB).clone()
    logits[:, 2] = -torch.inf
    key = torch.randint(0, 2**62, (num_rows,), generator=torch.Generator().manual_seed(3))
    sampling = DraftSampling(
        torch.full((num_rows,), temperature),
        key,
        torch.full((num_rows,), is_seeded),
        has_seeded=is_seeded,
        has_unseeded=not is_seeded,
    )
    return logits, sampling, torch.arange(num_rows) % 50 + 1


def assert_drawn_from(probabilities: Tensor, ids: Tensor) -> None:
    counts = torch.bincount(ids, minlength=len(probabilities))
    is_possible = probabilities > 0
    assert counts[~is_possible].sum() == 0
    expected = probabilities[is_possible].double()
    expected = expected / expected.sum() * len(ids)
    assert stats.chisquare(counts[is_possible].numpy(), expected.numpy()).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("is_seeded", [False, True])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 1.7])
def test_draws_have_the_softmax_s_distribution(drawn: Draw, temperature: float, is_seeded: bool) -> None:
    """Over keys; and the logits that come with them are those they were drawn from."""
    logits, sampling, num_tokens = rows(NUM_ROWS, temperature, is_seeded=is_seeded)
    ids, scaled = drawn(logits, sampling, num_tokens, 1)
    torch.testing.assert_close(scaled, logits / temperature)
    assert_drawn_from((logits[0] / temperature).softmax(-1), ids)


def test_drafts_and_steps_of_one_sequence_have_coins_of_their_own(drawn: Draw) -> None:
    """Of one key: many drafts of many steps are drawn from the softmax, any two of them independently."""
    num_steps, num_drafts = 2000, 15
    logits, sampling, _ = rows(num_steps, 1.0, is_seeded=False)
    one_key = replace(sampling, key=torch.full_like(sampling.key, 77))
    steps = torch.arange(num_steps) + 1
    ids = torch.stack([drawn(logits, one_key, steps, index)[0] for index in range(num_drafts)], 1)
    probabilities = logits[0].softmax(-1)
    assert_drawn_from(probabilities, ids.flatten())
    pairs = [(ids[:, :-1], ids[:, 1:]), (ids[:-1], ids[1:]), (ids[:-1, 1:], ids[1:, :-1])]
    for first, second in pairs:  # the next draft; the same of the next step; the one for the same position
        assert_drawn_from(torch.outer(probabilities, probabilities).flatten(), (first * VOCAB + second).flatten())


def test_coins_are_not_the_target_s_noise(drawn: Draw) -> None:
    logits, sampling, num_tokens = rows(NUM_ROWS, 1.0, is_seeded=False)
    ids = drawn(logits, sampling, num_tokens, 0)[0]
    chosen = (logits + gumbel(sampling.key, num_tokens, Stream.TARGET, VOCAB)).argmax(-1)
    probabilities = logits[0].softmax(-1)
    assert_drawn_from(torch.outer(probabilities, probabilities).flatten(), ids * VOCAB + chosen)


@pytest.mark.parametrize("index", [0, 3])
def test_seeded_rows_get_what_the_target_s_noise_picks(drawn: Draw, index: int) -> None:
    logits, sampling, num_tokens = rows(200, 0.8, is_seeded=True)
    noise = gumbel(sampling.key, num_tokens + index, Stream.TARGET, VOCAB)
    ids, _ = drawn(logits, sampling, num_tokens, index)
    assert torch.equal(ids, (logits / 0.8 + noise).argmax(-1))


def test_in_a_reduced_vocabulary_each_token_has_the_noise_of_the_target_s(drawn: Draw) -> None:
    logits, sampling, num_tokens = rows(200, 0.8, is_seeded=True)
    to_target = torch.randperm(400, generator=torch.Generator().manual_seed(1))[:VOCAB]
    noise = gumbel(sampling.key, num_tokens + 2, Stream.TARGET, 400)[:, to_target]
    ids, _ = drawn(logits, sampling, num_tokens, 2, to_target)
    assert torch.equal(ids, (logits / 0.8 + noise).argmax(-1))


@pytest.mark.parametrize("is_reduced", [False, True])
def test_greedy_seeded_and_other_rows_stand_side_by_side(drawn: Draw, is_reduced: bool) -> None:
    """Each gets what it would get alone."""
    logits, sampling, num_tokens = rows(300, 0.7, is_seeded=False)
    to_target = torch.arange(50, 50 + VOCAB) if is_reduced else None
    kind = torch.arange(300) % 3
    mixed = DraftSampling(
        torch.where(kind == 0, 0.0, sampling.temperature), sampling.key, kind == 1, has_seeded=True, has_unseeded=True
    )
    ids, scaled = drawn(logits, mixed, num_tokens, 1, to_target)
    assert torch.equal(ids[kind == 0], logits[kind == 0].argmax(-1))
    assert torch.equal(scaled[kind == 0], logits[kind == 0])
    for number, is_seeded in ((1, True), (2, False)):
        flags = torch.full_like(sampling.is_seeded, is_seeded)
        alone = replace(sampling, is_seeded=flags, has_seeded=is_seeded, has_unseeded=not is_seeded)
        expected, _ = drawn(logits, alone, num_tokens, 1, to_target)
        assert torch.equal(ids[kind == number], expected[kind == number])


def test_rows_that_are_no_numbers_leave_the_others_alone(drawn: Draw) -> None:
    logits, sampling, num_tokens = rows(40, 1.0, is_seeded=False)
    expected, _ = drawn(logits, sampling, num_tokens, 0)
    logits[::4] = torch.nan
    ids, _ = drawn(logits, sampling, num_tokens, 0)
    is_broken = torch.arange(40) % 4 == 0
    assert torch.equal(ids[~is_broken], expected[~is_broken])
    assert ((ids >= 0) & (ids < VOCAB)).all()


@pytest.mark.parametrize("is_reduced", [False, True])
def test_the_kernel_draws_as_its_twin(kernel_device: str, is_reduced: bool) -> None:
    logits, sampling, num_tokens = rows(8, 1.0, is_seeded=False)
    to_target = torch.arange(50, 50 + VOCAB) if is_reduced else None
    mixed = replace(sampling, is_seeded=torch.arange(8) % 2 == 0, temperature=torch.arange(8) * 0.3, has_seeded=True)
    found = Draw(kernel_device, gumbel_argmax)(logits, mixed, num_tokens, 1, to_target)
    expected = Draw("cpu", twin_of_kernel)(logits, mixed, num_tokens, 1, to_target)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])
