"""Draft after draft: each is drawn from what a network makes of the one before."""

import torch
from torch import Tensor

from proposers.base import Draft, DraftVocabulary, ProposeInput, TargetView
from proposers.draft_sampling import draw
from proposers.flat_tokens import FlatTokens
from proposers.network import BatchMemory, ChainNetwork
from server.model.attention import AttentionGroup


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
        ids: list[Tensor] = []
        logits: list[Tensor] = []
        keeps_logits = self.vocabulary is not None and inputs.sampling is not None and inputs.sampling.has_unseeded
        counts = torch.zeros_like(inputs.num_tokens)
        is_usable = torch.ones_like(counts, dtype=torch.bool) if is_ready is None else is_ready
        certainty = torch.ones_like(counts, dtype=torch.float32)
        for index in range(width):
            if hidden is None or index:
                newest = inputs.token_ids[inputs.slots, inputs.num_tokens - 1].long() if index == 0 else ids[-1]
                tokens = _last_tokens(inputs, index, is_usable & (inputs.num_tokens + index <= limit))
                positions, step = tokens.step(memory, starts)
                hidden = self._network.forward(newest, positions, step, hidden)
            scores = self._network.logits(hidden)
            chosen, drawn_from = self._choose(scores, inputs, index)
            if keeps_logits:
                logits.append(drawn_from)
            is_usable = is_usable & torch.isfinite(scores.amax(-1))
            counts += is_usable
            ids.append(chosen if self._to_target is None else self._to_target[chosen])
            if self._least_certainty:
                certainty *= torch.exp(drawn_from.amax(-1) - drawn_from.logsumexp(-1))
                is_usable = is_usable & (certainty >= self._least_certainty)
                if self._may_stop and not is_usable.any():
                    break
        room = (limit - inputs.num_tokens + 1).clamp(min=0)
        counts = torch.minimum(torch.minimum(counts, room), inputs.max_drafts.long())
        is_draft = torch.arange(len(ids), device=counts.device) < counts[:, None]
        return Draft(
            torch.where(is_draft, torch.stack(ids, 1), -1).int(),
            counts.int(),
            torch.stack(logits, 1) if keeps_logits else None,
        )

    def _choose(self, scores: Tensor, inputs: ProposeInput, index: int) -> tuple[Tensor, Tensor]:
        if self.vocabulary is None or inputs.sampling is None:
            return scores.argmax(-1), scores
        return draw(scores, inputs.sampling, inputs.num_tokens, index, self._to_target)


def _last_tokens(inputs: ProposeInput, index: int, is_real: Tensor) -> FlatTokens:
    """One token for each sequence: the one in front of the draft with this index."""
    row = torch.arange(inputs.slots.shape[0], device=inputs.slots.device)
    return FlatTokens(
        slots=inputs.slots,
        positions=inputs.num_tokens + index - 1,
        is_real=is_real,
        rows=inputs.slots,
        first_token=row,
        num_query=torch.ones_like(row),
        groups=(AttentionGroup(0, row.shape[0], 0, 1, inputs.max_num_tokens + index),),
    )
