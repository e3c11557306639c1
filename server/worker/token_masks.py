"""What a step's guided rows are allowed, on its way to the device."""

from collections.abc import Mapping
from dataclasses import dataclass

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
