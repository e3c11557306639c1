"""Log probabilities of the raw distribution: the model's own, before any sampling parameter."""

from dataclasses import dataclass

import torch
from torch import Tensor

from server.engine.protocol import PositionLogprobs, TokenLogprob
from server.model.head import LMHead
from server.worker.transfer import Transfer

VOCAB_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """For n positions: the chosen token's log probability and rank, and the `top` likeliest tokens.

    chosen_ids, ranks: [n] int64; chosen: [n] float32; top_ids: [n, top] int64; top: [n, top] float32.
    """

    chosen_ids: Tensor
    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor

    def download(self, transfer: Transfer) -> "LogprobTensors":
        """Host copies, valid after the step's event."""
        download = transfer.download
        return LogprobTensors(
            download(self.chosen_ids),
            download(self.chosen),
            download(self.ranks),
            download(self.top_ids),
            download(self.top),
        )

    def positions(self, first: int, count: int, num_top: int) -> tuple[PositionLogprobs, ...]:
        """Plain values of `count` positions from `first` on, with at most `num_top` tokens each; on the host."""
        rows = slice(first, first + count)
        columns = (self.chosen_ids, self.chosen, self.ranks, self.top_ids[:, :num_top], self.top[:, :num_top])
        return tuple(
            PositionLogprobs(
                TokenLogprob(chosen_id, chosen, rank),
                tuple(TokenLogprob(*entry, i) for i, entry in enumerate(zip(ids, values, strict=True), start=1)),
            )
            for chosen_id, chosen, rank, ids, values in zip(*(c[rows].tolist() for c in columns), strict=True)
        )


def chosen_logprobs(logits: Tensor, chosen_ids: Tensor, num_top: int) -> LogprobTensors:
    """Log probabilities of [n, vocab] float32 logits at [n] int64 chosen ids."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, chosen_ids[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    top, top_ids = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    return LogprobTensors(chosen_ids, chosen[:, 0], ranks, top_ids, top)


def prompt_logprobs(head: LMHead, hidden: Tensor, target_ids: Tensor, num_top: int) -> LogprobTensors:
    """The same for many positions, [n, hidden] and [n] int64, without ever holding [n, vocab] logits.

    The vocabulary is walked in chunks; normaliser, rank and the likeliest tokens are merged.
    """
    num_rows = hidden.shape[0]
    target = head.logits_at(hidden, target_ids)
    normaliser = target.new_full((num_rows,), -torch.inf)
    ranks = torch.ones_like(target_ids)
    top = target.new_empty(num_rows, 0)
    top_ids = target_ids.new_empty(num_rows, 0)
    for start in range(0, head.vocab_size, VOCAB_CHUNK):
        logits = head.logits_between(hidden, start, start + VOCAB_CHUNK)
        normaliser = torch.logaddexp(normaliser, logits.logsumexp(-1))
        token_ids = torch.arange(start, start + logits.shape[1], device=hidden.device)
        # The target's logit was computed by another reduction: it must not outrank itself.
        is_other = token_ids != target_ids[:, None]
        ranks += ((logits > target[:, None]) & is_other).sum(-1)
        merged = torch.cat((top, logits), dim=1)
        top, place = merged.topk(min(num_top, merged.shape[1]), dim=1)
        top_ids = torch.cat((top_ids, token_ids.expand(num_rows, -1)), dim=1).gather(1, place)
    return LogprobTensors(target_ids, target - normaliser, ranks, top_ids, top - normaliser[:, None])
