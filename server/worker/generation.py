"""The second segment of a step: from hidden states to tokens, and to drafts of the next ones."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from proposers.base import DraftVocabulary
from server.model.head import LMHead
from server.worker.batch import BatchState
from server.worker.draft_time import DraftSpan
from server.worker.drafting import Drafting
from server.worker.logits import LogitsProcessor
from server.worker.logprobs import LogprobTensors, chosen_logprobs
from server.worker.rejection import Acceptance, Drafts, RejectionRule
from server.worker.sampler import Sampler
from server.worker.step_inputs import SamplingRows, StepInputs
from server.worker.target import TargetOutputs


@dataclass(frozen=True, slots=True)
class Generated:
    """What the sampling rows brought, M of them, with Q positions each.

    Attributes:
        columns: int64, to be brought back to the host, in this order: [M] each, num_accepted, num_drafted and
            num_next_drafts; then [M * Q] each, token ids and the bits of their scores as float64. Of a row's Q the
            first 1 + num_accepted count.
        logprobs: Q positions for each row that reports, in order.
        failures: by index of a row, what its logits processing raised.
        draft_span: when drafts were proposed.
        next_drafts: [M, 1 + k] int64, the rank and the ids of the drafts for the next step; None where the host need
            not know them.
    """

    columns: tuple[Tensor, ...]
    logprobs: LogprobTensors | None
    failures: Mapping[int, str]
    draft_span: DraftSpan
    next_drafts: Tensor | None


NUM_COUNTS = 3
"""Columns of [M] in Generated."""


class Generation:
    """Processes logits, chooses tokens, verifies drafts, appends what was generated, drafts anew.

    Drafts are kept as long as each equals the token that was chosen at its position. For greedy rows that is the
    likeliest token, for seeded rows the one their seed gives there. For all others the noise is as good as any:
    the chosen token is drawn from the target, so a draft is kept with the probability that the target gives it,
    and what replaces it is drawn from the rest. That is rejection sampling for drafts that were proposed with
    certainty (Leviathan et al. 2023, arXiv:2211.17192, with q one-hot). Where drafts are drawn, or another rule is
    asked for, the drafts of those others are judged by that; see Sampler.
    """

    def __init__(
        self,
        batch: BatchState,
        head: LMHead,
        processor: LogitsProcessor,
        drafting: Drafting,
        acceptance: Acceptance,
        vocabulary: DraftVocabulary | None,
        *,
        max_drafts: int,
    ) -> None:
        """Args: vocabulary: see RejectionRule. max_drafts: that a row may have, wherever they come from."""
        self._batch = batch
        self._head = head
        self._processor = processor
        self._drafting = drafting
        device = batch.num_tokens.device
        self._offsets = torch.arange(1 + max_drafts, device=device)
        self._sampler = Sampler(batch, RejectionRule(acceptance, vocabulary, device))

    def generate(self, inputs: StepInputs, outputs: TargetOutputs) -> Generated:
        """Without columns if no row samples."""
        sampling = inputs.sampling
        if sampling is None:
            span = self._drafting.begin_span(inputs)
            self._drafting.follow(inputs, outputs)
            span.end()
            return Generated(columns=(), logprobs=None, failures={}, next_drafts=None, draft_span=span)
        batch, slots = self._batch, sampling.slots
        logits = self._head.logits(sampling.of(outputs.hidden))
        raw = None if sampling.reporting is None else logits[sampling.reporting.rows]
        failures = self._processor.apply(logits, sampling)
        num_tokens = batch.num_tokens[slots]
        drafts = self._drafts(sampling, num_tokens)
        chosen = self._sampler.choose(logits, sampling, num_tokens, drafts)
        token_ids, num_accepted = chosen.ids, chosen.num_accepted
        if drafts is None or num_accepted is None:
            num_accepted = num_drafted = torch.zeros_like(slots)
            end, next_ids = num_tokens, token_ids[:, 0]
        else:
            num_drafted = drafts.counts
            end, next_ids = num_tokens + num_accepted, token_ids.gather(1, num_accepted[:, None])[:, 0]
        batch.token_ids[slots, end] = next_ids.int()
        batch.num_tokens[slots] = end + sampling.num_new
        batch.num_computed[slots] = end
        span = self._drafting.begin_span(inputs)
        self._drafting.follow(inputs, outputs)
        num_next_drafts = self._drafting.propose(sampling, outputs.hidden, num_accepted)
        span.end()
        score_bits = chosen.scores.double().view(torch.int64)
        return Generated(
            columns=(num_accepted, num_drafted, num_next_drafts, token_ids.view(-1), score_bits.view(-1)),
            logprobs=None if raw is None else self._logprobs(raw, token_ids, sampling),
            failures=failures,
            draft_span=span,
            next_drafts=self.next_drafts(slots) if sampling.masks is not None and sampling.num_proposed else None,
        )

    def _drafts(self, sampling: SamplingRows, num_tokens: Tensor) -> Drafts | None:
        """What is to be verified; None where there is no room for drafts."""
        if sampling.num_positions == 1:
            return None
        batch, slots = self._batch, sampling.slots
        ahead = self._offsets[: sampling.num_positions - 1]
        ids = batch.token_ids[slots[:, None], num_tokens[:, None] + ahead]
        logits = None if batch.draft_logits is None else batch.draft_logits[slots, : len(ahead)]
        return Drafts(ids, torch.minimum(batch.num_drafts[slots], sampling.max_drafts), logits)

    def next_drafts(self, slots: Tensor) -> Tensor:
        """See Generated: masks of a grammar depend on the drafts behind the known tokens, and are made on the host."""
        batch = self._batch
        places = batch.num_tokens[slots][:, None] + self._offsets[:-1]
        return torch.cat((batch.draft_rank[slots, None], batch.token_ids[slots[:, None], places].long()), dim=1)

    def _logprobs(self, raw: Tensor, token_ids: Tensor, sampling: SamplingRows) -> LogprobTensors:
        assert sampling.reporting is not None
        num_top = max(sampling.infos[i].params.logprobs or 0 for i in sampling.reporting.index)
        return chosen_logprobs(raw.flatten(0, 1), sampling.reporting.of(token_ids).flatten(), num_top)
