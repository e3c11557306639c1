"""Chooses tokens from processed logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from server.kernels import cpu_sampling, jit
from server.kernels.gumbel_argmax import gumbel_argmax
from server.kernels.noise import Stream, gumbel
from server.kernels.reference import restrict
from server.kernels.truncate import truncate
from server.model.sampling_operators import has_sampling_operators
from server.worker.batch import BatchState
from server.worker.rejection import Drafts, RejectionRule, Verified, count_accepted
from server.worker.step_inputs import SamplingRows, Selection


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens of M rows.

    Attributes:
        ids: [M, Q] int64, those of a row's drafts that are kept, then the token that follows them.
        scores: [M, Q], of the best there was at each position: minus infinity where no token is left to choose,
            NaN or infinity where the logits were. Ids and scores count up to the first token that is no draft.
        num_accepted: [M] int64, drafts kept; None where there are no drafts.
    """

    ids: Tensor
    scores: Tensor
    num_accepted: Tensor | None


class Sampler:
    """Chooses argmax(logits / temperature + noise of a row's key and position); owned by the runner.

    That is a draw from the softmax. Greedy rows, of temperature 0, have no noise. A draft is kept where it is what
    was chosen. Rows with noise and no seed may have their drafts judged by the rejection rule instead: always where
    it is another rule than this, and where noise is dear, which is where there is no kernel for it; the rule takes
    one number for each draft and draws one token.
    """

    def __init__(self, batch: BatchState, rule: RejectionRule) -> None:
        self._batch = batch
        self._rule = rule
        # torch's own takes ten times as long on the CPU.
        self._argmax = cpu_sampling.argmax if has_sampling_operators(batch.num_tokens.device) else _argmax

    def choose(self, logits: Tensor, sampling: SamplingRows, position: Tensor, drafts: Drafts | None) -> Chosen:
        """Choose a token at each position, and say how many drafts are kept.

        Args:
            logits: [M, Q, vocab], processed; overwritten.
            position: [M] int64, of the first token to be chosen; those of a row follow each other.
            drafts: None where Q is 1.
        """
        if jit.is_available(logits.device):
            return self._choose_by_kernels(logits, sampling, position, drafts)
        rejecting = sampling.rejecting
        if drafts is not None and rejecting is not None and rejecting.is_all:
            verified = self._verify(logits, sampling, rejecting, position, drafts)
            assert verified.scores is not None, "only kernels give none"
            return Chosen(_joined(drafts, verified), verified.scores, verified.num_accepted)
        target = logits
        if sampling.coupled is not None:
            coupled = self._coupled(logits, sampling, sampling.coupled, position)
            target = coupled if sampling.coupled.is_all else logits.index_copy_(0, sampling.coupled.rows, coupled)
        ids, scores = self._argmax(target)
        if drafts is None:
            return Chosen(ids, scores, None)
        num_accepted = count_accepted(drafts.ids, drafts.counts, ids)
        if rejecting is not None:
            judged = drafts.of(rejecting.rows)
            verified = self._verify(logits, sampling, rejecting, position, judged)
            ids[rejecting.rows] = _joined(judged, verified)
            num_accepted[rejecting.rows] = verified.num_accepted
        return Chosen(ids, scores, num_accepted)

    def _verify(
        self, logits: Tensor, sampling: SamplingRows, chosen: Selection, position: Tensor, drafts: Drafts
    ) -> Verified:
        """The chosen rows by the rule. Args: drafts: theirs."""
        target = self._target_logits(logits, sampling, chosen)
        return self._rule.verify(target, drafts, self._batch.key[chosen.of(sampling.slots)], chosen.of(position))

    def _choose_by_kernels(
        self, logits: Tensor, sampling: SamplingRows, position: Tensor, drafts: Drafts | None
    ) -> Chosen:
        batch, slots = self._batch, sampling.slots
        if sampling.is_captured or sampling.coupled is not None or sampling.rejecting is not None:
            truncate(logits, slots, batch.temperature, batch.min_p, batch.top_k, batch.top_p)
        key, noise = batch.key[slots], batch.noise[slots]
        ids, scores = gumbel_argmax(logits, key, position, noise, Stream.TARGET)
        if drafts is None:
            return Chosen(ids, scores, None)
        num_accepted = count_accepted(drafts.ids, drafts.counts, ids)
        if not self._rule.is_coupling and (sampling.is_captured or sampling.rejecting is not None):
            verified = self._rule.verify(logits, drafts, key, position)
            is_judged = batch.is_rejecting[slots] > 0
            ids = torch.where(is_judged[:, None], _joined(drafts, verified), ids)
            num_accepted = torch.where(is_judged, verified.num_accepted, num_accepted)
        return Chosen(ids, scores, num_accepted)

    def _coupled(self, logits: Tensor, sampling: SamplingRows, chosen: Selection, position: Tensor) -> Tensor:
        """Logits with noise at each position, of the chosen rows."""
        scores = self._target_logits(logits, sampling, chosen)
        positions = chosen.of(position)[:, None] + torch.arange(logits.shape[1], device=position.device)
        keys = self._batch.key[chosen.of(sampling.slots)][:, None].expand_as(positions)
        return scores.add_(gumbel(keys, positions, Stream.TARGET, logits.shape[2]))

    def _target_logits(self, logits: Tensor, sampling: SamplingRows, chosen: Selection) -> Tensor:
        """Of the chosen rows, after temperature, min-p, top-k and top-p."""
        batch, slots = self._batch, chosen.of(sampling.slots)
        params = [sampling.infos[i].params for i in chosen.index]
        return restrict(
            chosen.of(logits).div_(batch.temperature[slots][:, None, None]),
            top_k=batch.top_k[slots] if any(row.top_k > 0 for row in params) else None,
            top_p=batch.top_p[slots] if any(row.top_p < 1 for row in params) else None,
            min_p=batch.min_p[slots] if any(row.min_p > 0 for row in params) else None,
        )


def _joined(drafts: Drafts, verified: Verified) -> Tensor:
    """[n, k + 1] int64: the drafts, and at the number of those kept the token that follows them."""
    ids = torch.cat((drafts.ids.long(), verified.next_ids[:, None]), dim=1)
    return ids.scatter_(1, verified.num_accepted[:, None], verified.next_ids[:, None])


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    ids = logits.argmax(-1)
    return ids, logits.gather(-1, ids[..., None])[..., 0]
