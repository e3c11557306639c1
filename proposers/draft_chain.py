"""Draft after draft: each is drawn from what a network makes of the one before."""

from dataclasses import replace

import torch
from torch import Tensor

from proposers.base import Draft, DraftVocabulary, ProposeInput, TargetView
from proposers.draft_sampling import Drawn, Draws
from proposers.flat_tokens import FlatTokens
from proposers.network import BatchMemory, ChainNetwork
from server.model.attention import AttentionGroup, AttentionStep


class DraftChain:
    """Runs a network over its own drafts, all sequences at a time; owned by its proposer."""

    def __init__(
        self,
        network: ChainNetwork,
        target: TargetView,
        *,
        num_drafts: int,
        is_sampled: bool,
        limit: int,
        least_certainty: float,
    ) -> None:
        """Args:
        num_drafts: most. is_sampled: whether they are drawn. limit: the network takes positions below it.
        least_certainty: a sequence gets no further drafts once the product of the network's largest probabilities,
            one for each draft so far, is below it. What is drawn afterwards has no part in that, so acceptance stays
            exact: each rule of acceptance holds wherever drafts end by what they were and came from.
        """
        self._network = network
        self._num_drafts = num_drafts
        self._limit = limit
        self._least_certainty = least_certainty
        self._may_stop = target.device.type == "cpu"  # elsewhere the host would wait, or the step be captured
        self._to_target = network.to_target
        self.vocabulary = DraftVocabulary.of(network.to_target, target.vocab_size) if is_sampled else None

    def draft(
        self,
        inputs: ProposeInput,
        memory: BatchMemory,
        hidden: Tensor | None = None,
        is_ready: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Draft:
        """As many drafts as are wanted, behind the newest token of R sequences.

        Args:
            hidden: [R, hidden], what the network made of the newest tokens; None if it is still to run over them.
            is_ready: [R] bool, who may get drafts; None for all. starts: see FlatTokens.step.
        """
        limit = min(self._limit, memory.num_positions)
        width = self._num_drafts if inputs.num_proposed is None else min(self._num_drafts, inputs.num_proposed)
        sampling = None if self.vocabulary is None else inputs.sampling
        draws = None if sampling is None else Draws(sampling, inputs.num_tokens, self._to_target)
        places = _Places(inputs, memory, width, limit, is_ready, starts)
        ids: list[Tensor] = []
        drawn: list[Drawn] = []
        certainty: list[Tensor] = []
        for index in range(width):
            if hidden is None or index:
                newest = inputs.token_ids[inputs.slots, inputs.num_tokens - 1].long() if index == 0 else ids[-1]
                positions, step = places.of(index)
                hidden = self._network.forward(newest, positions, step, hidden)
            scores = self._network.logits(hidden)
            drawn.append(_likeliest(scores) if draws is None else draws.draw(scores, index))
            ids.append(drawn[-1].ids if self._to_target is None else self._to_target[drawn[-1].ids])
            if self._least_certainty:
                logits = drawn[-1].logits
                largest = torch.exp(logits.amax(-1) - logits.logsumexp(-1))
                certainty.append(largest if index == 0 else largest * certainty[-1])
                if self._may_stop and not _all_of(certainty[-1] >= self._least_certainty, is_ready).any():
                    break
        is_draft = torch.stack([each.best for each in drawn]).isfinite()
        if certainty:
            is_draft[1:] &= torch.stack(certainty)[:-1] >= self._least_certainty
        counts = _all_of(is_draft, is_ready).cumprod(0).sum(0)
        room = (limit - inputs.num_tokens + 1).clamp(min=0)
        counts = torch.minimum(torch.minimum(counts, room), inputs.max_drafts.long())
        is_kept = torch.arange(len(ids), device=counts.device) < counts[:, None]
        keeps_logits = sampling is not None and sampling.has_unseeded
        return Draft(
            torch.where(is_kept, torch.stack(ids, 1), -1).int(),
            counts.int(),
            torch.stack([each.logits for each in drawn], 1) if keeps_logits else None,
        )


def _likeliest(logits: Tensor) -> Drawn:
    return Drawn(logits.argmax(-1), logits, logits.amax(-1))


def _all_of(flags: Tensor, others: Tensor | None) -> Tensor:
    return flags if others is None else flags & others


class _Places:
    """Where the tokens in front of k drafts of R sequences go, [k, R], found all at once.

    Those in front of drafts that a sequence gets no more are not told from others: nobody attends to what is behind a
    sequence's newest token before it is written anew.
    """

    def __init__(
        self,
        inputs: ProposeInput,
        memory: BatchMemory,
        num_drafts: int,
        limit: int,
        is_ready: Tensor | None,
        starts: Tensor | None,
    ) -> None:
        self._context_bound = inputs.max_num_tokens
        self._rows = torch.arange(inputs.slots.shape[0], device=inputs.slots.device)
        ahead = torch.arange(num_drafts, device=inputs.slots.device)[:, None]
        tokens = FlatTokens(
            slots=inputs.slots,
            positions=inputs.num_tokens + ahead - 1,
            is_real=_all_of(inputs.num_tokens + ahead <= limit, is_ready),
            rows=inputs.slots,
            first_token=self._rows,
            num_query=torch.ones_like(self._rows),
            groups=(),
        )
        self._positions, self._step = tokens.step(memory, starts)

    def of(self, index: int) -> tuple[Tensor, AttentionStep]:
        """Positions of the tokens in front of one draft of each sequence, and how to attend."""
        positions, step = self._positions[index], self._step
        return positions, replace(
            step,
            write_blocks=step.write_blocks[index],
            write_offsets=step.write_offsets[index],
            positions=positions,
            groups=(AttentionGroup(0, self._rows.shape[0], 0, 1, self._context_bound + index),),
        )
