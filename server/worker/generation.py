"""The second segment of a step: from hidden states to tokens, and to drafts of the next ones."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from proposers.base import ProposeInput, Proposer
from server.model.head import LMHead
from server.worker.batch import BatchState
from server.worker.logits import LogitsProcessor
from server.worker.logprobs import LogprobTensors, chosen_logprobs
from server.worker.rejection import count_accepted
from server.worker.sampler import Sampler
from server.worker.step_inputs import SamplingRows


@dataclass(frozen=True, slots=True)
class Generated:
    """What the sampling rows brought, M of them, with Q positions each.

    Attributes:
        columns: to be brought back to the host, in this order: [M] each, num_accepted, num_drafted,
            num_next_drafts, is_broken (NaN or infinite where it matters), is_empty (no token left to choose); then
            [M * Q], token ids, of which a row's first 1 + num_accepted count.
        logprobs: Q positions for each row that reports, in order.
        failures: by index of a row, what its logits processing raised.
    """

    columns: tuple[Tensor, ...]
    logprobs: LogprobTensors | None
    failures: Mapping[int, str]


NUM_COLUMNS = 5
"""Columns of [M] in Generated."""


class Generation:
    """Processes logits, chooses tokens, verifies drafts, appends what was generated, drafts anew.

    Drafts are kept as long as each equals the token that was chosen at its position. For greedy rows that is the
    likeliest token, for seeded rows the one their seed gives there. For all others the noise is as good as any:
    the chosen token is drawn from the target, so a draft is kept with the probability that the target gives it,
    and what replaces it is drawn from the rest. That is rejection sampling for drafts that were proposed with
    certainty (Leviathan et al. 2023, arXiv:2211.17192, with q one-hot).
    """

    def __init__(
        self, batch: BatchState, head: LMHead, processor: LogitsProcessor, proposer: Proposer | None, max_tokens: int
    ) -> None:
        self._batch = batch
        self._head = head
        self._processor = processor
        self._sampler = Sampler(batch)
        self._proposer = proposer
        self._max_tokens = max_tokens

    def generate(self, sampling: SamplingRows, hidden: Tensor) -> Generated:
        """Args: hidden: [T, hidden] of all flat tokens."""
        batch, slots = self._batch, sampling.slots
        logits = self._head.logits(sampling.of(hidden))
        raw = None if sampling.reporting is None else logits[sampling.reporting.rows]
        failures = self._processor.apply(logits, sampling)
        num_tokens = batch.num_tokens[slots]
        token_ids, scores = self._sampler.choose(logits, sampling, num_tokens)
        if sampling.num_positions == 1:
            num_accepted = num_drafted = torch.zeros_like(slots)
            end, next_ids = num_tokens, token_ids[:, 0]
        else:
            offsets = torch.arange(sampling.num_positions, device=slots.device)
            drafts = batch.token_ids[slots[:, None], num_tokens[:, None] + offsets[:-1]]
            num_drafted = torch.minimum(batch.num_drafts[slots], sampling.max_drafts)
            num_accepted = count_accepted(drafts, num_drafted, token_ids)
            end, next_ids = num_tokens + num_accepted, token_ids.gather(1, num_accepted[:, None])[:, 0]
            # What comes after the next token was computed in vain, NaN or not.
            scores = scores.masked_fill(offsets > num_accepted[:, None], 0.0)
        is_broken, is_empty = ~(scores < torch.inf), scores == -torch.inf
        if sampling.num_positions > 1:
            is_broken, is_empty = is_broken.any(-1), is_empty.any(-1)
        batch.token_ids[slots, end] = next_ids.int()
        batch.num_tokens[slots] = end + sampling.num_new
        batch.num_computed[slots] = end
        num_next_drafts = self._draft(sampling)
        columns = (num_accepted, num_drafted, num_next_drafts, is_broken.view(-1), is_empty.view(-1))
        return Generated(
            columns=(*columns, token_ids.view(-1)),
            logprobs=None if raw is None else self._logprobs(raw, token_ids, sampling),
            failures=failures,
        )

    def _logprobs(self, raw: Tensor, token_ids: Tensor, sampling: SamplingRows) -> LogprobTensors:
        assert sampling.reporting is not None
        num_top = max(sampling.infos[i].params.logprobs or 0 for i in sampling.reporting.index)
        return chosen_logprobs(raw.flatten(0, 1), sampling.reporting.of(token_ids).flatten(), num_top)

    def _draft(self, sampling: SamplingRows) -> Tensor:
        """Put new drafts behind the known tokens. Returns: [M] int64, how many."""
        batch, slots = self._batch, sampling.slots
        if self._proposer is None:
            return torch.zeros_like(slots)
        if not sampling.is_drafting:
            batch.num_drafts.index_fill_(0, slots, 0)
            return torch.zeros_like(slots)
        num_tokens = batch.num_tokens[slots]
        bound = max([row.context_bound for row in sampling.rows], default=self._max_tokens) + 1
        draft = self._proposer.propose(
            ProposeInput(batch.token_ids, slots, num_tokens, batch.max_drafts[slots], max_num_tokens=bound)
        )
        ahead = num_tokens[:, None] + torch.arange(draft.ids.shape[1], device=slots.device)
        batch.token_ids[slots[:, None], ahead] = draft.ids.clamp(min=0)  # padding is never read, but must be an index
        num_drafts = draft.counts.long()
        batch.num_drafts[slots] = num_drafts
        return num_drafts
