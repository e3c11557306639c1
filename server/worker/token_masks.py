"""What a step's guided rows are allowed, on its way to the device."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from server.kernels import jit, token_mask, token_mask_reference


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of G of a step's sampling rows.

    Attributes:
        rows: [G] int64, which they are. bits: [G, q, words] int32, see kernels.token_mask.
        errors: by index of a row, why it can go on no longer.
    """

    rows: Tensor
    bits: Tensor
    errors: Mapping[int, str]

    def apply(self, logits: Tensor) -> None:
        """Forbid what is not allowed, in place. Args: logits: [M, Q, vocab] float32."""
        kernels = token_mask if jit.is_available(logits.device) else token_mask_reference
        kernels.mask_tokens(logits, self.rows, self.bits)


class StandingMasks:
    """Masks at a place of their own, which captured steps read: of the rows that a step puts there, and no others."""

    def __init__(self, num_rows: int, num_positions: int, vocab_size: int, device: torch.device) -> None:
        """Args: num_rows, num_positions: most of a captured step."""
        self._rows = torch.arange(num_rows, device=device)
        self._bits = torch.zeros(num_rows, num_positions, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self._counts = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._is_empty = True

    def put(self, masks: TokenMasks | None) -> None:
        """Hold those of the step that comes, once they are on the device; None where nobody is guided."""
        if masks is None and self._is_empty:
            return
        self._is_empty = masks is None
        self._counts.zero_()
        if masks is not None:
            num_positions = masks.bits.shape[1]
            self._bits[masks.rows, :num_positions] = masks.bits
            self._counts.index_fill_(0, masks.rows, num_positions)

    def apply(self, logits: Tensor) -> None:
        """Forbid what is not allowed, in place. Args: logits: [M, Q, vocab] float32."""
        num_rows, num_positions, _ = logits.shape
        kernels = token_mask if jit.is_available(logits.device) else token_mask_reference
        bits = self._bits[:num_rows, :num_positions]
        kernels.mask_tokens(logits, self._rows[:num_rows], bits, self._counts[:num_rows])
