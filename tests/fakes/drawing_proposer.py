"""A drafter with a distribution of its own, over a part of the target's vocabulary."""

import torch

from proposers.base import Draft, DraftVocabulary, ProposeInput
from proposers.draft_sampling import Draws


class DrawingProposer:
    """Draws each draft from a fixed random distribution given the token before; implements proposers.base.Proposer.

    Args: known: the tokens it knows, in the order of its own ids.
    """

    runs_on_device = True

    def __init__(self, k: int, vocab_size: int, known: range, device: str) -> None:
        self.num_speculative_tokens = k
        self._known = torch.tensor(known, device=device)
        to_draft = torch.full((vocab_size,), -1, dtype=torch.int32, device=device)
        to_draft[self._known] = torch.arange(len(known), dtype=torch.int32, device=device)
        self.vocabulary = DraftVocabulary(len(known), torch.float32, to_draft)
        generator = torch.Generator(device).manual_seed(3)
        self._table = 2 * torch.randn(vocab_size, len(known), generator=generator, device=device)

    def propose(self, inputs: ProposeInput) -> Draft:
        """As many as each row may have."""
        assert inputs.sampling is not None
        last = inputs.token_ids[inputs.slots, inputs.num_tokens - 1].long()
        ids, logits = [], []
        draws = Draws(inputs.sampling, inputs.num_tokens, self._known)
        for index in range(self.num_speculative_tokens):
            drawn = draws.draw(self._table[last], index)
            last = self._known[drawn.ids]
            ids.append(last)
            logits.append(drawn.logits)
        place = torch.arange(len(ids), device=last.device)
        counts = inputs.max_drafts.clamp(max=len(ids))
        drafts = torch.where(place < counts[:, None], torch.stack(ids, 1), -1)
        return Draft(drafts.int(), counts, torch.stack(logits, 1))
