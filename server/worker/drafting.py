"""Drafts that are made on the device, right behind what a step has sampled."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proposers.base import DraftSampling, ProposeInput, Proposer
from proposers.network import ComputedTokens, Follower
from server.plan import PlanRow, RowResult, SequenceStart
from server.worker.batch import BatchState
from server.worker.draft_time import NO_DRAFTS, DraftSpan, begin_span
from server.worker.step_inputs import SamplingRows, StepInputs
from server.worker.target import TargetOutputs


class CaughtUp(NamedTuple):
    """What a step did for those before it: so many positions, and when."""

    num_positions: int
    span: DraftSpan


class Drafting:
    """The proposers on the device with the batch; owned by the runner.

    Attributes:
        tapped: layers of the target whose inputs the followers want.
    """

    def __init__(
        self, batch: BatchState, proposer: Proposer | None, followers: Sequence[Follower], *, max_tokens: int
    ) -> None:
        """Args:
        proposer: what drafts, for whatever others it stands.
        followers: those of them that follow the target. max_tokens: longest sequence.
        """
        self._batch = batch
        self._proposer = proposer
        self._followers = followers
        self._max_tokens = max_tokens
        self._num_computed: dict[int, int] = {}
        features = [follower.features for follower in followers]
        self.tapped = sorted({index for wanted in features if isinstance(wanted, tuple) for index in wanted})
        self._needs_hidden = getattr(proposer, "needs_hidden", False)  # few proposers do, the others need not say so

    def begin(self, starts: Sequence[SequenceStart], rows: Sequence[PlanRow], *, is_followed: bool) -> CaughtUp:
        """A step begins; the batch knows of its starts. Returns: what is done with it of earlier steps."""
        if not self._followers:
            return CaughtUp(0, NO_DRAFTS)
        span = begin_span(self._batch.num_tokens.device) if is_followed else NO_DRAFTS  # or nothing is caught up with
        for start in starts:
            self._num_computed[start.slot] = start.num_computed
        num_done = 0
        for follower in self._followers:
            for start in starts:
                follower.start(start)
            num_done += follower.begin(rows, is_followed=is_followed)
        span.end()
        return CaughtUp(num_done, span if num_done else NO_DRAFTS)

    def begin_span(self, inputs: StepInputs) -> DraftSpan:
        """Begin to time `follow` and `propose`, where one of them does something."""
        is_idle = inputs.sampling is None and not self._followers
        if self._proposer is None or not inputs.is_followed or is_idle:
            return NO_DRAFTS
        return begin_span(self._batch.num_tokens.device)

    def settle(self, rows: Sequence[PlanRow], results: Sequence[RowResult]) -> None:
        """A step has settled. Args: rows: in the results' order."""
        if not self._followers:
            return
        for row, result in zip(rows, results, strict=True):
            if result.error is None:
                # Of a row that samples, the last token is not computed yet, and drafts are only if they were kept.
                num_kept = len(result.token_ids) - 1 - row.num_drafts if row.is_sampling else 0
                self._num_computed[row.slot] += row.num_query + num_kept
        for follower in self._followers:
            follower.settle(rows, self._num_computed)

    def follow(self, inputs: StepInputs, outputs: TargetOutputs) -> None:
        """Show the step to the followers, once its tokens are known."""
        for follower in self._followers:
            computed = ComputedTokens(
                slots=inputs.token_slot,
                positions=outputs.positions,
                is_real=outputs.is_real,
                features=_features(follower, outputs),
                rows=inputs.slots,
                first_token=inputs.first_token,
                num_query=inputs.num_query,
                groups=inputs.groups,
            )
            follower.remember(computed)
            if inputs.is_followed:
                follower.follow(computed)

    def propose(self, sampling: SamplingRows, hidden: Tensor, num_accepted: Tensor) -> Tensor:
        """Put new drafts behind the known tokens.

        Args: hidden: [T, hidden] of all flat tokens. num_accepted: [M] int64, drafts that were just kept.
        Returns: [M] int64, how many.
        """
        batch, slots = self._batch, sampling.slots
        if self._proposer is None or not sampling.num_proposed:
            batch.num_drafts.index_fill_(0, slots, 0)
            return torch.zeros_like(slots)
        num_tokens = batch.num_tokens[slots]
        bound = max([row.context_bound for row in sampling.rows], default=self._max_tokens) + 1
        draft = self._proposer.propose(
            ProposeInput(
                batch.token_ids,
                slots,
                num_tokens,
                batch.max_drafts[slots],
                max_num_tokens=bound,
                num_proposed=min(sampling.num_proposed, self._proposer.num_speculative_tokens),
                sampling=self._sampling(sampling),
                hidden=_chosen_by(sampling, hidden, num_accepted) if self._needs_hidden else None,
            )
        )
        width = draft.ids.shape[1]
        ahead = num_tokens[:, None] + torch.arange(width, device=slots.device)
        batch.token_ids[slots[:, None], ahead] = draft.ids.clamp(min=0)  # padding is never read, but must be an index
        if batch.draft_logits is not None and draft.logits is not None:
            batch.draft_logits[slots, :width] = draft.logits
        if draft.ranks is not None:
            batch.draft_rank[slots] = draft.ranks.long()
        num_drafts = draft.counts.long()
        batch.num_drafts[slots] = num_drafts
        return num_drafts

    def _sampling(self, sampling: SamplingRows) -> DraftSampling:
        batch, slots = self._batch, sampling.slots
        noisy = [info for info in sampling.infos if info.is_noisy]
        return DraftSampling(
            temperature=batch.temperature[slots],
            key=batch.key[slots],
            is_seeded=batch.is_rejecting[slots] == 0,
            has_seeded=sampling.is_captured or any(info.is_seeded for info in noisy),
            has_unseeded=sampling.is_captured or not all(info.is_seeded for info in noisy),
        )


def _features(follower: Follower, outputs: TargetOutputs) -> Tensor | None:
    wanted = follower.features
    if wanted is None:
        return None
    return outputs.hidden if wanted == "last" else torch.cat([outputs.taps[index] for index in wanted], dim=-1)


def _chosen_by(sampling: SamplingRows, hidden: Tensor, num_accepted: Tensor) -> Tensor:
    """[M, hidden], what each row's last token was chosen by."""
    rows = torch.arange(num_accepted.shape[0], device=num_accepted.device)
    return sampling.of(hidden)[rows, num_accepted]
