"""What a request does to its logits before anything is sampled.

Each of a row's positions is processed with the context it really has: the tokens known before the
step, then the drafts in front of it. Both stand next to each other in the batch's token rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.request import Request
from server.worker.batch import BatchState
from server.worker.slot_info import has_rules
from server.worker.step_inputs import SamplingRows
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

    def start(self, slot: int, request: Request) -> None:
        """Take in the rules of a sequence that enters the batch."""
        self._rules.pop(slot, None)
        if not has_rules(request):
            return
        sampling = request.sampling
        needs_stops = sampling.min_tokens > 0 and request.stop_token_ids
        self._rules[slot] = _SlotRules(
            bias=self._bias(request),
            stop_ids=self._transfer.upload_ids(sorted(request.stop_token_ids)) if needs_stops else None,
            bad_words=_BadWords.of(words, self._transfer) if (words := request.bad_words_token_ids) else None,
        )

    def apply(self, logits: Tensor, sampling: SamplingRows) -> dict[int, str]:
        """Process [M, Q, vocab] float32 logits in place.

        Returns: for each row whose processing raised, its index and why; its logits are unusable.
        """
        failed: dict[int, str] = {}
        for i, row in enumerate(sampling.rows):
            rules = self._rules.get(row.slot)
            if rules is not None:
                try:
                    self._apply_rules(logits[i], row.slot, rules)
                except Exception as error:  # this request's own parameters broke it; the others go on
                    failed[i] = f"logits processing failed: {type(error).__name__}: {error}"
        if sampling.penalised is not None:
            bound = max(sampling.rows[i].context_bound for i in sampling.penalised.index)
            self._penalise(logits, sampling.penalised.rows, sampling.slots, bound)
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

    def _penalise(self, logits: Tensor, rows: Tensor, slots: Tensor, bound: int) -> None:
        """Repetition, frequency and presence penalties of the given rows, in place."""
        batch = self._batch
        slots = slots[rows]
        num_positions = logits.shape[1]
        token_ids = batch.token_ids[slots, : bound + num_positions].long()
        place = torch.arange(token_ids.shape[1], device=logits.device)
        num_tokens = batch.num_tokens[slots][:, None]
        is_prompt = place < batch.num_prompt[slots][:, None]
        is_output = ~is_prompt & (place < num_tokens)
        shape = (rows.shape[0], self._vocab_size)
        in_prompt = logits.new_zeros(shape).scatter_add_(1, token_ids, is_prompt.float()) > 0
        counts = logits.new_zeros(shape).scatter_add_(1, token_ids, is_output.float())
        repetition = batch.repetition_penalty[slots][:, None]
        frequency = batch.frequency_penalty[slots][:, None]
        presence = batch.presence_penalty[slots][:, None]
        one = counts.new_ones(rows.shape[0], 1)
        for position in range(num_positions):
            if position > 0:  # the draft before this position is part of its context
                draft = token_ids.gather(1, num_tokens + position - 1)
                counts = counts.scatter_add(1, draft, one)
            row_logits = logits[rows, position]
            seen = in_prompt | (counts > 0)
            scaled = torch.where(row_logits > 0, row_logits / repetition, row_logits * repetition)
            row_logits = torch.where(seen, scaled, row_logits)
            logits[rows, position] = row_logits - frequency * counts - presence * (counts > 0)


def restrict(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Mask what the sampling parameters leave out of [n, q, vocab] logits (temperature applied); in place.

    Args: top_k: [n] int64, below 1 keeps all. top_p, min_p: [n] float32. None where no row needs it.
    Ties at the k-th place are all kept, as are those at top-p's edge.
    """
    if min_p is not None:
        floor = logits.amax(-1, keepdim=True) + min_p[:, None, None].log()
        logits.masked_fill_(logits < floor, -torch.inf)
    if top_k is None and top_p is None:
        return logits
    ordered, _ = logits.sort(-1, descending=True)
    vocab_size = logits.shape[-1]
    if top_k is not None:
        k = torch.where(top_k < 1, vocab_size, top_k).clamp(max=vocab_size)
        kth = ordered.gather(-1, (k - 1)[:, None, None].expand(-1, logits.shape[1], 1))
        logits.masked_fill_(logits < kth, -torch.inf)
        ordered.masked_fill_(ordered < kth, -torch.inf)
    if top_p is not None:
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs  # mass of what is likelier: the first token that reaches top_p stays
        # Rounding takes the sum to 1 early: a row that keeps all must not lose its tail by a neighbour's top_p.
        mass = torch.where(top_p < 1, top_p, torch.inf)
        num_kept = (before < mass[:, None, None]).sum(-1, keepdim=True)
        edge = ordered.gather(-1, (num_kept - 1).clamp(min=0))  # none where every logit is NaN or minus infinity
        logits.masked_fill_(logits < edge, -torch.inf)
    return logits
