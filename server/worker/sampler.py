"""Chooses tokens from processed logits."""

import torch
from torch import Tensor

from server.kernels import jit
from server.kernels.gumbel_argmax import gumbel_argmax
from server.kernels.reference import restrict
from server.kernels.truncate import truncate
from server.worker.batch import BatchState
from server.worker.noise import Stream, gumbel
from server.worker.step_inputs import SamplingRows, Selection


class Sampler:
    """One rule for all rows: argmax(logits / temperature + noise of their key and position); owned by the runner.

    That is a draw from the softmax. Greedy rows, of temperature 0, have no noise.
    """

    def __init__(self, batch: BatchState) -> None:
        self._batch = batch

    def choose(self, logits: Tensor, sampling: SamplingRows, position: Tensor) -> tuple[Tensor, Tensor]:
        """Choose a token at each position.

        Args:
            logits: [M, Q, vocab], processed; overwritten.
            position: [M] int64, of the first token to be chosen; those of a row follow each other.

        Returns: ids, [M, Q] int64, and their scores, [M, Q]: minus infinity where no token is left to choose,
            NaN or infinity where the logits were.
        """
        batch, slots = self._batch, sampling.slots
        if jit.is_available(logits.device):
            if sampling.is_captured or sampling.noisy is not None:
                truncate(logits, slots, batch.temperature, batch.min_p, batch.top_k, batch.top_p)
            noise = batch.noise[slots]
            chosen: tuple[Tensor, Tensor] = gumbel_argmax(logits, batch.key[slots], position, noise, Stream.TARGET)
            return chosen
        if sampling.noisy is not None:
            noisy = self._noisy(logits, sampling, sampling.noisy, position)
            logits = noisy if sampling.noisy.is_all else logits.index_copy_(0, sampling.noisy.rows, noisy)
        ids = _argmax(logits)
        return ids, logits.gather(-1, ids[..., None])[..., 0]

    def _noisy(self, logits: Tensor, sampling: SamplingRows, noisy: Selection, position: Tensor) -> Tensor:
        """The scores of the noisy rows, from everybody's logits."""
        batch, slots = self._batch, noisy.of(sampling.slots)
        params = [sampling.infos[i].params for i in noisy.index]
        scores = restrict(
            noisy.of(logits) / batch.temperature[slots][:, None, None],
            top_k=batch.top_k[slots] if any(row.top_k > 0 for row in params) else None,
            top_p=batch.top_p[slots] if any(row.top_p < 1 for row in params) else None,
            min_p=batch.min_p[slots] if any(row.min_p > 0 for row in params) else None,
        )
        positions = noisy.of(position)[:, None] + torch.arange(logits.shape[1], device=logits.device)
        keys = batch.key[slots][:, None].expand_as(positions)
        return scores.add_(gumbel(keys, positions, Stream.TARGET, logits.shape[2]))


def _argmax(scores: Tensor) -> Tensor:
    """argmax over the last dimension; NaN counts as the largest."""
    if scores.device.type == "cpu":  # numpy's is vectorised, torch's takes ten times as long
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)
