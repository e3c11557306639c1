"""Masks from packed bits: the kernel and its twin against bits looked at one by one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from server.kernels import token_mask, token_mask_reference

Mask = Callable[[Tensor, Tensor, Tensor], None]


def is_allowed(bits: Tensor, token_id: int) -> bool:
    """Of [words] bits."""
    return bool((int(bits[token_id // 32]) >> (token_id % 32)) & 1)


def random_bits(num_rows: int, num_positions: int, vocab_size: int, seed: int) -> Tensor:
    """Words at random, with whole rows of zeros and of ones among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (num_rows, num_positions, -(-vocab_size // 32)), generator=generator)
    bits[0, 0], bits[-1, -1] = 0, -1
    return bits.int()


@pytest.fixture(params=["kernel", "twin"])
def mask(request: pytest.FixtureRequest) -> Mask:
    return token_mask.mask_tokens if request.param == "kernel" else token_mask_reference.mask_tokens


@pytest.mark.parametrize(("vocab_size", "num_positions"), [(40, 1), (64, 3), (5001, 2)])
def test_forbidden_tokens_are_minus_infinity_and_others_untouched(
    mask: Mask, kernel_device: str, vocab_size: int, num_positions: int
) -> None:
    raw = torch.randn(3, 5, vocab_size, generator=torch.Generator().manual_seed(1)).transpose(0, 1)
    raw[1, 0, 7], raw[1, 0, 8] = torch.nan, torch.inf
    rows, bits = torch.tensor([3, 1]), random_bits(2, num_positions, vocab_size, seed=vocab_size)
    bits[1, 0, 0] = -1  # of the row with infinity and NaN, which must not be hidden where they are allowed
    logits = raw.clone().to(kernel_device)
    mask(logits, rows.to(kernel_device), bits.to(kernel_device))
    expected = raw.clone()
    for i, row in enumerate(rows.tolist()):
        for position in range(num_positions):
            forbidden = [token for token in range(vocab_size) if not is_allowed(bits[i, position], token)]
            expected[row, position, forbidden] = -torch.inf
    torch.testing.assert_close(logits.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("logits", "rows", "bits"),
    [
        (torch.zeros(2, 1, 64), torch.zeros(2, dtype=torch.int64), torch.zeros(1, 1, 2, dtype=torch.int32)),
        (torch.zeros(2, 1, 64), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, 2, dtype=torch.int32)),
        (torch.zeros(2, 1, 65), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 2, dtype=torch.int32)),
        (torch.zeros(2, 1, 64).double(), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 2, dtype=torch.int32)),
        (torch.zeros(2, 64, 2).mT, torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 2, dtype=torch.int32)),
    ],
    ids=["rows", "positions", "vocabulary", "type", "layout"],
)
def test_what_does_not_fit_is_refused(mask: Mask, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    with pytest.raises(ValueError, match=r"fit|float32|contiguous"):
        mask(logits, rows, bits)
