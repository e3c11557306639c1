"""What a request does to its logits before anything is sampled.

Each of a row's positions is processed with the context it really has: the tokens known before the
step, then the drafts in front of it. Both stand next to each other in the batch's token rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.kernels import jit, reference
from server.kernels.penalties import penalise
from server.request import Request
from server.worker.batch import BatchState
from server.worker.slot_info import has_rules, masks_early_stops
from server.worker.step_inputs import SamplingRows
from server.worker.token_masks import StandingMasks
from server.worker.transfer import Transfer


@dataclass(frozen=True, slots=True)
class _BadWords:
    """W token sequences never to be completed, all looked up at once.

    Attributes:
        beginnings: [W, L] int64, all but their last ids, at the right; -1, which fits any token, before shorter ones.
        last_ids: [W] int64.
    """

    beginnings: Tensor
    last_ids: Tensor

    @classmethod
    def of(cls, words: Sequence[tuple[int, ...]], transfer: Transfer) -> "_BadWords":
        """Lay out one or more words, none empty."""
        width = max(map(len, words)) - 1
        padded = [-1 if i < 0 else word[i] for word in words for i in range(len(word) - 1 - width, len(word) - 1)]
        beginnings = transfer.upload_ids(padded).view(len(words), width)
        return cls(beginnings, transfer.upload_ids([word[-1] for word in words]))


@dataclass(frozen=True, slots=True)
class _SlotRules:
    """What one slot's request asks for, as device tensors.

    Attributes:
        bias: [vocab] float32 to add: logit_bias, and -inf for what allowed_token_ids leaves out.
        stop_ids: [n] int64, not to be chosen before min_tokens.
        bad_words: sequences never to be completed.
    """

    bias: Tensor | None
    stop_ids: Tensor | None
    bad_words: _BadWords | None


class LogitsProcessor:
    """Applies every slot's rules; owned by the runner."""

    def __init__(self, batch: BatchState, vocab_size: int, transfer: Transfer) -> None:
        self._batch = batch
        self._vocab_size = vocab_size
        self._transfer = transfer
        self._rules: dict[int, _SlotRules] = {}
        self._counts: Tensor | None = None
        self._standing_masks: StandingMasks | None = None
        if jit.is_available(transfer.device):
            self._counts = batch.num_tokens.new_zeros(batch.spare_slot + 1, vocab_size, dtype=torch.int32)

    def keep_masks(self, num_rows: int, num_positions: int) -> StandingMasks:
        """Where captured steps of at most so many rows, with so many positions each, find their masks."""
        device = self._transfer.device
        self._standing_masks = StandingMasks(num_rows, num_positions, self._vocab_size, device)
        return self._standing_masks

    def start(self, slot: int, request: Request) -> None:
        """Take in the rules of a sequence that enters the batch."""
        self._rules.pop(slot, None)
        if not has_rules(request):
            return
        self._rules[slot] = _SlotRules(
            bias=self._bias(request),
            stop_ids=self._transfer.upload_ids(sorted(request.stop_token_ids)) if masks_early_stops(request) else None,
            bad_words=_BadWords.of(words, self._transfer) if (words := request.bad_words_token_ids) else None,
        )

    def apply(self, logits: Tensor, sampling: SamplingRows) -> dict[int, str]:
        """Process [M, Q, vocab] float32 logits in place.

        Returns: for each row whose processing raised, its index and why; its logits are unusable.
        """
        if sampling.is_captured and self._standing_masks is not None:
            self._standing_masks.apply(logits)
        elif sampling.masks is not None:
            sampling.masks.apply(logits)
        failed: dict[int, str] = {}
        for i, row in enumerate(sampling.rows):
            rules = self._rules.get(row.slot)
            if rules is not None:
                try:
                    self._apply_rules(logits[i], row.slot, rules)
                except Exception as error:  # this request's own parameters broke it; the others go on
                    failed[i] = f"logits processing failed: {type(error).__name__}: {error}"
        if sampling.is_captured or sampling.penalised is not None:
            self._penalise(logits, sampling)
        return failed

    def _bias(self, request: Request) -> Tensor | None:
        sampling = request.sampling
        if sampling.allowed_token_ids is None and not sampling.logit_bias:
            return None
        if sampling.allowed_token_ids is None:
            bias = torch.zeros(self._vocab_size, device=self._transfer.device)
        else:
            bias = torch.full((self._vocab_size,), -torch.inf, device=self._transfer.device)
            bias.index_fill_(0, self._transfer.upload_ids(list(sampling.allowed_token_ids)), 0)
        if sampling.logit_bias:
            token_ids = self._transfer.upload_ids(list(sampling.logit_bias))
            bias[token_ids] += self._transfer.upload(list(sampling.logit_bias.values()), torch.float32)
        return bias

    def _apply_rules(self, logits: Tensor, slot: int, rules: _SlotRules) -> None:
        """[Q, vocab] of one row, in place."""
        batch = self._batch
        if rules.bias is not None:
            logits += rules.bias
        positions = batch.num_tokens[slot] + torch.arange(logits.shape[0], device=logits.device)
        if rules.stop_ids is not None:
            is_early = positions < batch.first_stop[slot]
            stop_logits = logits[:, rules.stop_ids]
            logits[:, rules.stop_ids] = stop_logits.masked_fill(is_early[:, None], -torch.inf)
        if rules.bad_words is not None:
            self._mask_bad_words(logits, slot, positions, rules.bad_words)

    def _mask_bad_words(self, logits: Tensor, slot: int, positions: Tensor, words: _BadWords) -> None:
        """[Q, vocab] of one row, in place; only what was generated counts as the beginning of a word."""
        width = words.beginnings.shape[1]
        places = positions[:, None] + torch.arange(-width, 0, device=logits.device)
        context = self._batch.token_ids[slot][places.clamp(min=0)].long()
        context.masked_fill_(places < self._batch.num_prompt[slot], -2)  # fits nothing
        fits = (words.beginnings == context[:, None]) | (words.beginnings < 0)
        num_completed = torch.zeros_like(logits).index_add_(1, words.last_ids, fits.all(-1).to(logits.dtype))
        logits.masked_fill_(num_completed > 0, -torch.inf)

    def _penalise(self, logits: Tensor, sampling: SamplingRows) -> None:
        """Repetition, frequency and presence penalties, in place."""
        batch = self._batch
        columns = (
            batch.num_tokens,
            batch.num_prompt,
            batch.repetition_penalty,
            batch.frequency_penalty,
            batch.presence_penalty,
        )
        if self._counts is not None:
            penalise(logits, batch.token_ids, sampling.slots, *columns, self._counts)
        elif sampling.penalised is not None:
            rows = sampling.penalised.rows
            bound = max(sampling.rows[i].context_bound for i in sampling.penalised.index) + logits.shape[1]
            part = logits[rows]
            reference.penalise(part, batch.token_ids[:, :bound], sampling.slots[rows], *columns)
            logits[rows] = part
