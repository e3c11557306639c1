"""Drafts that are made on the host, between a step's settling and the launch of the sequences' next one."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from proposers.base import HostProposer, SequenceText
from proposers.chain import certain_logits
from server.plan import PlanRow, RowResult, SequenceStart, StepResult
from server.worker.batch import BatchState
from server.worker.flight import Flight

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedDrafts:
    """Drafts of n slots on their way to the device: [n] int64 each but [n, k] int32 ids, 0 behind the last."""

    slots: Tensor
    counts: Tensor
    ranks: Tensor
    ids: Tensor


class RankedDraft(NamedTuple):
    """What one sequence is to have verified next, and the rank of the proposer it is from."""

    token_ids: Sequence[int]
    rank: int


class HostDrafting:
    """The host proposers with the batch; owned by the runner.

    Settled tokens go to each of them. A sequence's drafts come from the first that has some, and go behind its known
    tokens unless a proposer on the device that ranks before it has put some there.

    Attributes:
        pending: by slot, what is staged with the sequence's next row.
    """

    def __init__(self, members: Sequence[tuple[int, HostProposer]], batch: BatchState, vocab_size: int) -> None:
        """Args: members: with the rank of each among all proposers, ascending."""
        self._members = members
        self._batch = batch
        self._vocab_size = vocab_size
        self._width = max(member.num_speculative_tokens for _, member in members)
        self._max_drafts: dict[int, int] = {}
        self._failed: set[tuple[int, int]] = set()
        self.pending: dict[int, RankedDraft] = {}
        self._offsets = torch.arange(self._width, device=batch.num_tokens.device)
        self._spent_s = 0.0

    def start(self, start: SequenceStart) -> None:
        """A sequence takes a slot."""
        slot = start.slot
        self.pending.pop(slot, None)
        self._max_drafts[slot] = start.num_speculative_tokens
        if start.num_speculative_tokens == 0:
            return
        began_s = time.perf_counter()
        text = SequenceText(start.token_ids, start.num_prompt, start.request.cache_salt)
        for rank, member in self._members:
            self._failed.discard((rank, slot))
            try:
                member.start(slot, text)
            except Exception as error:
                self._note_failure(rank, member, slot, error)
        self._spent_s += time.perf_counter() - began_s

    def advance(self, rows: Sequence[PlanRow], result: StepResult, *, proposes: bool) -> StepResult:
        """Draft behind the tokens of a settled step, or only take them in.

        Args: rows: those of the plan, in the result's order.
        Returns: the result, with at least as many next drafts as there are, and what making them took.
        """
        began_s = time.perf_counter()
        pairs = zip(rows, result.rows, strict=True)
        advanced = tuple([self._advance_row(*pair, proposes=proposes) for pair in pairs])
        told = [row.slot for row, settled in zip(rows, result.rows, strict=True) if settled.token_ids]
        if not any(self._max_drafts[slot] for slot in told):
            return replace(result, rows=advanced)
        spent_s, self._spent_s = self._spent_s + time.perf_counter() - began_s, 0.0
        return replace(result, rows=advanced, draft_s=result.draft_s + spent_s if proposes else result.draft_s)

    def _advance_row(self, row: PlanRow, result: RowResult, *, proposes: bool) -> RowResult:
        slot = row.slot
        max_drafts = self._max_drafts[slot]
        if max_drafts == 0 or not result.token_ids:
            return result
        drafts: Sequence[int] = ()
        for rank, member in self._members:
            if (rank, slot) in self._failed:
                continue
            try:
                member.extend(slot, result.token_ids)
                if proposes and not drafts:
                    drafts = self._usable(member, member.propose(slot, max_drafts), max_drafts)
                    self.pending[slot] = RankedDraft(drafts, rank)
            except Exception as error:
                self._note_failure(rank, member, slot, error)
        if not drafts:
            self.pending.pop(slot, None)
            return result
        return result._replace(num_next_drafts=max(result.num_next_drafts, len(drafts)))

    def _usable(self, member: HostProposer, drafts: Sequence[int], max_drafts: int) -> Sequence[int]:
        """The drafts up to the first that no model has an embedding for."""
        limit = min(max_drafts, member.num_speculative_tokens)
        outside = [i for i, token_id in enumerate(drafts) if not 0 <= token_id < self._vocab_size]
        return drafts[: min([limit, *outside])]

    def _note_failure(self, rank: int, member: HostProposer, slot: int, error: Exception) -> None:
        """What drafts must not end what is drafted for."""
        self._failed.add((rank, slot))
        logger.error("%s failed; it drafts no more for one sequence", type(member).__name__, exc_info=error)

    def stage(self, rows: Sequence[PlanRow], flight: Flight) -> StagedDrafts | None:
        """Put the drafts of a plan's rows into its flight."""
        slots = [row.slot for row in rows if row.slot in self.pending]
        if not slots:
            return None
        drafts = [self.pending.pop(slot) for slot in slots]
        ids = [token_id for draft in drafts for token_id in self._padded(draft.token_ids)]
        return StagedDrafts(
            flight.put(slots),
            flight.put([len(draft.token_ids) for draft in drafts]),
            flight.put([draft.rank for draft in drafts]),
            flight.put(ids, torch.int32).view(len(slots), self._width),
        )

    def _padded(self, token_ids: Sequence[int]) -> list[int]:
        return [*token_ids, *[0] * (self._width - len(token_ids))]

    def apply(self, staged: StagedDrafts) -> None:
        """Put what was staged behind the known tokens, once its flight was sent."""
        batch, slots = self._batch, staged.slots
        places = slots[:, None], batch.num_tokens[slots][:, None] + self._offsets
        is_taken = (batch.num_drafts[slots] == 0) | (staged.ranks < batch.draft_rank[slots])
        batch.token_ids[places] = torch.where(is_taken[:, None], staged.ids, batch.token_ids[places])
        batch.num_drafts[slots] = torch.where(is_taken, staged.counts, batch.num_drafts[slots])
        if batch.draft_logits is not None:
            logits = batch.draft_logits[slots]
            certain = certain_logits(staged.ids, logits.shape[2]).to(logits.dtype)
            logits[:, : self._width] = torch.where(is_taken[:, None, None], certain, logits[:, : self._width])
            batch.draft_logits[slots] = logits
