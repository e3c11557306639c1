"""The twin of token_mask, and what runs on the CPU: 70 microseconds for 6 positions of 49,152 tokens."""

import numpy as np
import torch
from torch import Tensor

from server.kernels.token_mask import check

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_CEILINGS = np.where(_BITS, np.float32(np.inf), np.float32(-np.inf))
"""[256, 8] float32: what a byte of bits lets the logits of eight tokens be at most."""


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor, counts: Tensor | None = None) -> None:
    """See token_mask.mask_tokens."""
    check(logits, rows, bits, counts)
    vocab_size = logits.shape[2]
    numbers = [bits.shape[1]] * len(rows) if counts is None else counts.tolist()
    for row, row_bits, number in zip(rows.tolist(), bits, numbers, strict=True):
        target = logits[row, :number]
        torch.minimum(target, _ceilings(row_bits[:number])[:, :vocab_size], out=target)


def _ceilings(bits: Tensor) -> Tensor:
    """[q, words] -> [q, 32 * words]: infinity for tokens that are allowed, minus infinity for others."""
    octets = bits.view(torch.uint8)
    if bits.device.type == "cpu":  # half of what looking up takes in torch, and a fourth of filling by booleans
        return torch.from_numpy(_CEILINGS.take(octets.numpy(), axis=0, mode="clip")).flatten(1)
    return torch.from_numpy(_CEILINGS).to(bits.device)[octets.int()].flatten(1)
