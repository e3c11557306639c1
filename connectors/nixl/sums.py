"""Checksums of blocks, wherever they are."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from connectors.wire import checksum

_SEED = 20130
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MASK = 2**64 - 1


def xxh3_sums(blocks: Sequence[Tensor]) -> list[int]:
    """XXH3-64 of each. Args: blocks: [nbytes] uint8 each, in host memory."""
    return [checksum(block.numpy().data) for block in blocks]


def word_sums(blocks: Tensor) -> list[int]:
    """Of each block the sum of its words, each times a weight of its place, modulo 2**64.

    Weights are odd, so that no single word can change without the sum; those of two places differ, so that words that
    have changed places are found. It is no protection against malice.

    Args: blocks: [n, nbytes] uint8, contiguous, on any device.
    """
    width = next(width for width in _WORDS if blocks.shape[1] % width == 0)
    words = blocks.view(_WORDS[width]).long()
    sums = (words * _weights(words.shape[1], blocks.device)).sum(1).tolist()
    return [value & _MASK for value in sums]


@lru_cache(maxsize=8)
def _weights(count: int, device: torch.device) -> Tensor:
    """[count] int64, odd: the same in every process."""
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    return (drawn * 2 + 1).to(device)
