"""Uniform numbers: the kernel against tensors, bit by bit, through the interpreter where there is no GPU."""

import pytest
import torch

from server.kernels.noise import Stream, uniform
from server.kernels.noise_kernel import uniforms

KEYS = (0, 1, 2**63 - 1, 5, -(2**63), 2**40 + 3)
FIRST = (0, 2**31, 7 * 64, 100, 3, 2**62)


@pytest.mark.parametrize("stream", Stream)
@pytest.mark.parametrize("count", [1, 2, 5, 8, 31])
def test_numbers_equal_the_twin(kernel_device: str, count: int, stream: Stream) -> None:
    key, first = (torch.tensor(values, device=kernel_device) for values in (KEYS, FIRST))
    positions = first[:, None] + torch.arange(count, device=kernel_device)
    found = uniforms(key, first, count, stream)
    assert torch.equal(found, uniform(key[:, None].expand_as(positions), positions, stream))
    assert bool(((found > 0) & (found < 1)).all())


def test_nobody_and_nothing(kernel_device: str) -> None:
    rows = torch.zeros(3, dtype=torch.int64, device=kernel_device)
    assert uniforms(rows[:0], rows[:0], 4, Stream.ACCEPT).shape == (0, 4)
    assert uniforms(rows, rows, 0, Stream.ACCEPT).shape == (3, 0)


def test_wrong_arguments_are_refused(kernel_device: str) -> None:
    rows = torch.zeros(4, dtype=torch.int64, device=kernel_device)
    for key, first in ((rows, rows[:2]), (rows.int(), rows), (rows[None], rows[None])):
        with pytest.raises(ValueError, match="int64"):
            uniforms(key, first, 2, Stream.ACCEPT)
    with pytest.raises(ValueError, match="contiguous"):
        uniforms(rows[::2], rows[::2], 2, Stream.ACCEPT)
