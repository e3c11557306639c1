"""The random numbers: uniform, independent, and the same everywhere."""

import pytest
import torch
from scipy import stats
from torch import Tensor

from server.kernels.noise import Stream, gumbel, uniform

NUM_DRAWS = 1 << 20
SIGNIFICANCE = 1e-4


def draws(device: str, key: int, stream: Stream, *, first: int = 0, count: int = NUM_DRAWS) -> Tensor:
    """One uniform number for each of consecutive positions of a key."""
    positions = torch.arange(first, first + count, device=device)
    return uniform(torch.full_like(positions, key), positions, stream).cpu()


def assert_uniform(values: Tensor, num_bins: int = 256) -> None:
    counts = torch.histc(values, num_bins, 0, 1)
    assert stats.chisquare(counts.numpy()).pvalue > SIGNIFICANCE


def assert_independent(first: Tensor, second: Tensor, num_bins: int = 16) -> None:
    cells = (first * num_bins).long() * num_bins + (second * num_bins).long()
    counts = torch.bincount(cells, minlength=num_bins**2)
    assert stats.chisquare(counts.numpy()).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("stream", Stream)
@pytest.mark.parametrize("key", [0, 1, 2**63 - 1])
def test_positions_of_a_key_are_uniform_inside_the_open_interval(device_name: str, key: int, stream: Stream) -> None:
    values = draws(device_name, key, stream)
    assert values.min() > 0
    assert values.max() < 1
    assert_uniform(values)


def test_consecutive_keys_at_one_position_are_uniform(device_name: str) -> None:
    keys = torch.arange(NUM_DRAWS, device=device_name)
    values = uniform(keys, torch.zeros_like(keys), Stream.TARGET).cpu()
    assert_uniform(values)
    assert_independent(values[:-1], values[1:])


def test_streams_positions_and_keys_are_independent(device_name: str) -> None:
    target = draws(device_name, 7, Stream.TARGET)
    for stream in (Stream.ACCEPT, Stream.RESAMPLE):
        assert_independent(target, draws(device_name, 7, stream))
    assert_independent(target, draws(device_name, 7, Stream.TARGET, first=1))
    for other in (6, 8, 7 ^ (1 << 40)):
        assert_independent(target, draws(device_name, other, Stream.TARGET))


def test_gumbel_has_its_distribution_and_neighbouring_tokens_are_independent(device_name: str) -> None:
    positions = torch.arange(1 << 11, device=device_name)
    noise = gumbel(torch.full_like(positions, 3), positions, Stream.TARGET, 1 << 9).cpu()
    unit = (-(-noise.double()).exp()).exp()  # the distribution function at its own draws is uniform
    assert_uniform(unit.flatten().float())
    assert_independent(unit[:, :-1].flatten(), unit[:, 1:].flatten())
    assert_independent(unit[:-1].flatten(), unit[1:].flatten())


def test_an_argmax_of_gumbel_noise_draws_every_token_equally_often(device_name: str) -> None:
    keys = torch.arange(1 << 18, device=device_name)
    winners = gumbel(keys, torch.zeros_like(keys), Stream.TARGET, 8).argmax(-1).cpu()
    assert stats.chisquare(torch.bincount(winners, minlength=8).numpy()).pvalue > SIGNIFICANCE


def test_a_token_s_noise_does_not_depend_on_batch_or_vocabulary_size(device_name: str) -> None:
    keys, positions = (torch.tensor(values, device=device_name) for values in ([5, 9, 5], [0, 3, 8]))
    together = gumbel(keys, positions, Stream.TARGET, 100)
    alone = gumbel(keys[1:2], positions[1:2], Stream.TARGET, 10)
    assert torch.equal(together[1, :10], alone[0])


def test_golden_values(device_name: str) -> None:
    """Seeded answers must outlive a release, and be the same on every device."""
    keys, positions = (torch.tensor(values, device=device_name) for values in ([0, 1, 2**63 - 1], [0, 5, 2**31]))
    assert uniform(keys, positions, Stream.TARGET).tolist() == GOLDEN_TARGET
    assert uniform(keys, positions, Stream.ACCEPT).tolist() == GOLDEN_ACCEPT
    noise = gumbel(keys, positions, Stream.TARGET, 3).cpu()
    torch.testing.assert_close(noise, torch.tensor(GOLDEN_GUMBEL), rtol=1e-5, atol=1e-6)


GOLDEN_TARGET = [0.1989954560995102, 0.8218319416046143, 0.3199215829372406]
GOLDEN_ACCEPT = [0.9748837351799011, 0.7661137580871582, 0.27381011843681335]
GOLDEN_GUMBEL = [[1.50558, 0.592734, -0.381247], [-0.545243, 0.303833, -1.233994], [0.953092, -0.047024, 1.359524]]
