"""Chooses tokens from processed logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from server.kernels import jit
from server.kernels.gumbel_argmax import gumbel_argmax
from server.kernels.reference import restrict
from server.kernels.truncate import truncate
from server.worker.batch import BatchState
from server.worker.noise import Stream, gumbel, uniform
from server.worker.rejection import verify_standard
from server.worker.step_inputs import SamplingRows, Selection


@dataclass(frozen=True, slots=True)
class Drafts:
    """[M, k] integer draft ids and [M] int64 counts; what lies beyond a row's count is ignored."""

    ids: Tensor
    counts: Tensor


class Sampler:
    """One rule for all rows: argmax(logits / temperature + noise of their key and position); owned by the runner.

    That is a draw from the softmax. Greedy rows, of temperature 0, have no noise. Where noise is dear, which is
    where there is no kernel for it, rows without a seed have their drafts judged by one number each and draw one
    token only: the same distribution.
    """

    def __init__(self, batch: BatchState) -> None:
        self._batch = batch

    def choose(
        self, logits: Tensor, sampling: SamplingRows, position: Tensor, drafts: Drafts | None
    ) -> tuple[Tensor, Tensor]:
        """Choose a token at each position; a draft is to be kept where it is what was chosen.

        Args:
            logits: [M, Q, vocab], processed; overwritten.
            position: [M] int64, of the first token to be chosen; those of a row follow each other.
            drafts: None where Q is 1.

        Returns: [M, Q] int64 ids, and [M, Q] scores of the best there were: minus infinity where no token is left to
            choose, NaN or infinity where the logits were. Both count up to the first token that is not the draft.
        """
        batch, slots = self._batch, sampling.slots
        if jit.is_available(logits.device):
            if sampling.is_captured or sampling.coupled is not None or sampling.rejecting is not None:
                truncate(logits, slots, batch.temperature, batch.min_p, batch.top_k, batch.top_p)
            noise = batch.noise[slots]
            chosen: tuple[Tensor, Tensor] = gumbel_argmax(logits, batch.key[slots], position, noise, Stream.TARGET)
            return chosen
        if sampling.coupled is not None:
            coupled = self._coupled(logits, sampling, sampling.coupled, position)
            logits = coupled if sampling.coupled.is_all else logits.index_copy_(0, sampling.coupled.rows, coupled)
        ids = _argmax(logits)
        scores = logits.gather(-1, ids[..., None])[..., 0]
        if sampling.rejecting is not None and drafts is not None:
            ids[sampling.rejecting.rows] = self._rejecting(logits, sampling, sampling.rejecting, position, drafts)
        return ids, scores

    def _coupled(self, logits: Tensor, sampling: SamplingRows, chosen: Selection, position: Tensor) -> Tensor:
        """Logits with noise at each position, of the chosen rows."""
        scores = self._target_logits(logits, sampling, chosen)
        keys, positions = self._keys_and_positions(sampling, chosen, position, logits.shape[1])
        return scores.add_(gumbel(keys, positions, Stream.TARGET, logits.shape[2]))

    def _rejecting(
        self, logits: Tensor, sampling: SamplingRows, chosen: Selection, position: Tensor, drafts: Drafts
    ) -> Tensor:
        """Ids of the chosen rows: their drafts as far as they are kept, then the token drawn instead."""
        ids, counts = chosen.of(drafts.ids).long(), chosen.of(drafts.counts)
        probs = self._target_logits(logits, sampling, chosen).softmax(-1)
        keys, positions = self._keys_and_positions(sampling, chosen, position, logits.shape[1])
        uniforms = uniform(keys[:, 1:], positions[:, 1:], Stream.ACCEPT)
        noise = gumbel(keys[:, 0], positions[:, 0], Stream.RESAMPLE, logits.shape[2])
        verified = verify_standard(ids, counts, None, probs, uniforms, noise)
        ids = torch.cat((ids, verified.next_ids[:, None]), dim=1)
        return ids.scatter_(1, verified.num_accepted[:, None], verified.next_ids[:, None])

    def _target_logits(self, logits: Tensor, sampling: SamplingRows, chosen: Selection) -> Tensor:
        """Of the chosen rows, after temperature, min-p, top-k and top-p."""
        batch, slots = self._batch, chosen.of(sampling.slots)
        params = [sampling.infos[i].params for i in chosen.index]
        return restrict(
            chosen.of(logits) / batch.temperature[slots][:, None, None],
            top_k=batch.top_k[slots] if any(row.top_k > 0 for row in params) else None,
            top_p=batch.top_p[slots] if any(row.top_p < 1 for row in params) else None,
            min_p=batch.min_p[slots] if any(row.min_p > 0 for row in params) else None,
        )

    def _keys_and_positions(
        self, sampling: SamplingRows, chosen: Selection, position: Tensor, num_positions: int
    ) -> tuple[Tensor, Tensor]:
        """[n, num_positions] int64 each, of the chosen rows."""
        positions = chosen.of(position)[:, None] + torch.arange(num_positions, device=position.device)
        return self._batch.key[chosen.of(sampling.slots)][:, None].expand_as(positions), positions


def _argmax(scores: Tensor) -> Tensor:
    """argmax over the last dimension; NaN counts as the largest."""
    if scores.device.type == "cpu":  # numpy's is vectorised, torch's takes ten times as long
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)
