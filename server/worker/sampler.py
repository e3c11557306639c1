"""Chooses tokens: processes the target's logits, verifies the drafts, draws what follows them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.kernels import jit
from server.kernels.gumbel_argmax import gumbel_argmax
from server.request import SamplingParams
from server.worker.batch import BatchState
from server.worker.logits import restrict
from server.worker.noise import Stream, gumbel, uniform
from server.worker.rejection import Verified, verify_coupled, verify_standard
from server.worker.step_inputs import SamplingRows


@dataclass(frozen=True, slots=True)
class Drafts:
    """[m, k] int64 draft ids and [m] int64 counts; what lies beyond a row's count is ignored."""

    ids: Tensor
    counts: Tensor


class Sampler:
    """Samples the rows of a step by three rules; owned by the runner.

    Greedy rows take the likeliest token. Seeded rows take argmax(log p + noise of their key and
    position), so that their tokens do not depend on drafts. The others use `standard` rejection.
    """

    def __init__(self, batch: BatchState) -> None:
        self._batch = batch

    def sample(self, logits: Tensor, sampling: SamplingRows, drafts: Drafts) -> Verified:
        """Verify and sample.

        Args: logits: [M, Q, vocab] float32, processed; overwritten.
        """
        num_accepted, next_ids = torch.zeros_like(sampling.slots), torch.zeros_like(sampling.slots)
        rules = (
            (sampling.greedy, self._greedy),
            (sampling.seeded, self._coupled),
            (sampling.unseeded, self._standard),
        )
        for selection, rule in rules:
            if selection is None:
                continue
            params = [sampling.params[i] for i in selection.index]
            part = Drafts(selection.of(drafts.ids), selection.of(drafts.counts))
            verified = rule(selection.of(logits), params, selection.of(sampling.slots), part)
            num_accepted.index_copy_(0, selection.rows, verified.num_accepted)
            next_ids.index_copy_(0, selection.rows, verified.next_ids)
        return Verified(num_accepted, next_ids)

    def _greedy(self, logits: Tensor, _: Sequence[SamplingParams], slots: Tensor, drafts: Drafts) -> Verified:
        return verify_coupled(drafts.ids, drafts.counts, self._choose(logits, slots, temperature=0.0))

    def _coupled(self, logits: Tensor, params: Sequence[SamplingParams], slots: Tensor, drafts: Drafts) -> Verified:
        logits = self._target_logits(logits, params, slots)
        return verify_coupled(drafts.ids, drafts.counts, self._choose(logits, slots, temperature=1.0))

    def _choose(self, logits: Tensor, slots: Tensor, *, temperature: float) -> Tensor:
        """[m, q] ids: argmax of the logits, at temperature 1 with the noise of their keys and positions."""
        if jit.is_available(logits.device):
            key, position = self._batch.key[slots], self._batch.num_tokens[slots]
            temperatures = torch.full_like(position, temperature, dtype=torch.float32)
            chosen: Tensor = gumbel_argmax(logits, key, position, temperatures, Stream.TARGET)[0]
            return chosen
        if temperature == 0:
            return logits.argmax(-1)
        keys, positions = self._keys_and_positions(slots, logits.shape[1])
        return (logits + gumbel(keys, positions, Stream.TARGET, logits.shape[2])).argmax(-1)

    def _standard(self, logits: Tensor, params: Sequence[SamplingParams], slots: Tensor, drafts: Drafts) -> Verified:
        probs = self._target_logits(logits, params, slots).softmax(-1)
        keys, positions = self._keys_and_positions(slots, drafts.ids.shape[1] + 1)
        uniforms = uniform(keys[:, 1:], positions[:, 1:], Stream.ACCEPT)
        noise = gumbel(keys[:, 0], positions[:, 0], Stream.RESAMPLE, logits.shape[2])
        return verify_standard(drafts.ids, drafts.counts, None, probs, uniforms, noise)

    def _keys_and_positions(self, slots: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """[m, num_positions] int64 each; a position is that of the token to be chosen."""
        offsets = torch.arange(num_positions, device=slots.device)
        positions = self._batch.num_tokens[slots][:, None] + offsets
        return self._batch.key[slots][:, None].expand_as(positions), positions

    def _target_logits(self, logits: Tensor, params: Sequence[SamplingParams], slots: Tensor) -> Tensor:
        """Temperature, min-p, top-k and top-p."""
        batch = self._batch
        logits /= batch.temperature[slots][:, None, None]

        def column(values: Tensor, is_needed: Callable[[SamplingParams], bool]) -> Tensor | None:
            return values[slots] if any(is_needed(row) for row in params) else None

        return restrict(
            logits,
            top_k=column(batch.top_k, lambda row: row.top_k > 0),
            top_p=column(batch.top_p, lambda row: row.top_p < 1),
            min_p=column(batch.min_p, lambda row: row.min_p > 0),
        )
