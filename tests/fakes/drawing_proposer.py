"""A drafter with a distribution of its own, over a part of the target's vocabulary."""

import torch

from proposers.base import Draft, DraftVocabulary, ProposeInput
from proposers.draft_sampling import draw


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
        for index in range(self.num_speculative_tokens):
            drawn, drawn_from = draw(self._table[last], inputs.sampling, inputs.num_tokens, index, self._known)
            last = self._known[drawn]
            ids.append(last)
            logits.append(drawn_from)
        place = torch.arange(len(ids), device=last.device)
        counts = inputs.max_drafts.clamp(max=len(ids))
        drafts = torch.where(place < counts[:, None], torch.stack(ids, 1), -1)
        return Draft(drafts.int(), counts, torch.stack(logits, 1))
