"""Checksums of blocks that a device computes where they are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from connectors.nixl.sums import word_sums, xxh3_sums
from connectors.wire import checksum


def blocks_of(count: int, nbytes: int, seed: int = 0) -> torch.Tensor:
    """Random ones."""
    return torch.randint(0, 256, (count, nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(nbytes=st.integers(1, 80), bit=st.integers(0, 639))
def test_a_bit_that_has_flipped_is_found(nbytes: int, bit: int) -> None:
    blocks = blocks_of(3, nbytes)
    before = word_sums(blocks)
    blocks[1, bit // 8 % nbytes] ^= 1 << bit % 8
    after = word_sums(blocks)
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]


def test_words_that_have_changed_places_are_found() -> None:
    block = blocks_of(1, 64)
    swapped = block.view(torch.int64)[:, [1, 0, 2, 3, 4, 5, 6, 7]].view(torch.uint8)
    assert word_sums(block) != word_sums(swapped)


@pytest.mark.parametrize("nbytes", [64, 20, 6, 5])
def test_sums_are_the_same_in_every_process(nbytes: int) -> None:
    expected = {
        64: 0x74E6EE363AFB2800,
        20: 0xB048EE1C0DC00680,
        6: 0x2068028DDD4F9236,
        5: 0x66F3FA022E14F160,
    }
    assert word_sums(torch.arange(nbytes, dtype=torch.uint8)[None]) == [expected[nbytes]]


def test_on_the_host_they_are_those_of_the_wire() -> None:
    blocks = blocks_of(2, 100)
    assert xxh3_sums(list(blocks)) == [checksum(bytes(row.tolist())) for row in blocks]
