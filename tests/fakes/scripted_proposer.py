"""A drafter that knows the answers, and is wrong when it is told to be."""

import random
from collections.abc import Sequence

import torch

from proposers.base import Draft, ProposeInput


class ScriptedProposer:
    """Drafts what follows in one of the given texts; implements proposers.base.Proposer.

    Args:
        texts: prompt and answer of each sequence; for any other, drafts are guesses.
        error_rate: how often a draft token is a guess all the same.
    """

    runs_on_device = False
    vocabulary = None

    def __init__(self, k: int, texts: Sequence[Sequence[int]], *, error_rate: float = 0.0, seed: int = 0) -> None:
        self.num_speculative_tokens = k
        self.texts = [list(text) for text in texts]
        self._error_rate = error_rate
        self._rng = random.Random(seed)

    def propose(self, inputs: ProposeInput) -> Draft:
        """Draft on the host."""
        k = self.num_speculative_tokens
        rows = []
        for slot, length, most in zip(
            inputs.slots.tolist(), inputs.num_tokens.tolist(), inputs.max_drafts.tolist(), strict=True
        ):
            known = inputs.token_ids[slot, :length].tolist()
            text = next((text for text in self.texts if text[:length] == known), None)
            following = [self._guess() for _ in range(k)] if text is None else text[length : length + k]
            rows.append([self._drafted(token_id) for token_id in following[:most]])
        device = inputs.slots.device
        padded = [row + [-1] * (k - len(row)) for row in rows]
        return Draft(
            torch.tensor(padded, dtype=torch.int32, device=device),
            torch.tensor([len(row) for row in rows], dtype=torch.int32, device=device),
        )

    def _drafted(self, token_id: int) -> int:
        return self._guess() if self._rng.random() < self._error_rate else token_id

    def _guess(self) -> int:
        return self._rng.randrange(3, 200)
