"""Drafts that are made on the host, between a step's settling and the launch of the sequences' next one."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import index
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

    Settled tokens go to each of them, whether drafts are wanted or not; who is not asked for drafts is to do no more
    than note them. A sequence's drafts come from the first that has some, and go behind its known tokens unless a
    proposer on the device that ranks before it has put some there.

    Attributes:
        pending: by slot, what is staged with the sequence's next row.
    """

    def __init__(
        self, members: Sequence[tuple[int, HostProposer]], batch: BatchState, vocab_size: int, *, are_alone: bool
    ) -> None:
        """Args: members: with the rank of each among all proposers, ascending. are_alone: none is on the device."""
        self._members = members
        self._batch = batch
        self._vocab_size = vocab_size
        self._are_alone = are_alone
        self._width = max(member.num_speculative_tokens for _, member in members)
        self._max_drafts: dict[int, int] = {}
        self._drafting: dict[int, tuple[tuple[int, HostProposer], ...]] = {}  # by slot, those that have not failed
        self.pending: dict[int, RankedDraft] = {}
        self._offsets = torch.arange(self._width, device=batch.num_tokens.device)
        self._spent_s = 0.0

    def start(self, start: SequenceStart) -> None:
        """A sequence takes a slot."""
        slot = start.slot
        self.pending.pop(slot, None)
        self._max_drafts[slot] = start.num_speculative_tokens
        self._drafting[slot] = ()
        if start.num_speculative_tokens == 0:
            return
        began_s = time.perf_counter()
        self._drafting[slot] = tuple(self._members)
        text = SequenceText(start.token_ids, start.num_prompt, start.request.cache_salt)
        for rank, member in self._members:
            try:
                member.start(slot, text)
            except Exception as error:
                self._drop(rank, member, slot, error)
        self._spent_s += time.perf_counter() - began_s

    def advance(self, rows: Sequence[PlanRow], result: StepResult, *, proposes: bool) -> StepResult:
        """Draft behind the tokens of a settled step, or only take them in.

        Args: rows: those of the plan, in the result's order.
        Returns: the result, with at least as many next drafts as there are, and what making them took.
        """
        began_s = time.perf_counter()
        if not self._tell(rows, result.rows):
            return result
        spent_s, self._spent_s = self._spent_s, 0.0
        if not proposes:
            return result
        advanced = tuple(map(self._draft, rows, result.rows))
        return replace(result, rows=advanced, draft_s=result.draft_s + spent_s + time.perf_counter() - began_s)

    def _tell(self, rows: Sequence[PlanRow], settled: Sequence[RowResult]) -> bool:
        """All tokens of a step, before the first draft behind it. Returns: whether anybody is drafted for."""
        drafting, pending, has_told = self._drafting, self.pending, False
        for row, result in zip(rows, settled, strict=True):
            slot, token_ids = row.slot, result.token_ids
            if not token_ids:
                continue
            if pending:
                pending.pop(slot, None)
            for rank, member in drafting[slot]:
                has_told = True
                try:
                    member.extend(slot, token_ids)
                except Exception as error:
                    self._drop(rank, member, slot, error)
        return has_told

    def _draft(self, row: PlanRow, result: RowResult) -> RowResult:
        if not result.token_ids:
            return result
        slot, most = row.slot, self._max_drafts[row.slot]
        for rank, member in self._drafting[slot]:
            try:
                drafts = self._usable(member.propose(slot, most), min(most, member.num_speculative_tokens))
            except Exception as error:
                self._drop(rank, member, slot, error)
                continue
            if drafts:
                self.pending[slot] = RankedDraft(drafts, rank)
                return result._replace(num_next_drafts=max(result.num_next_drafts, len(drafts)))
        return result

    def _usable(self, drafts: Sequence[int], limit: int) -> Sequence[int]:
        """So many drafts, up to the first that no model has an embedding for.

        Raises: TypeError for what is no integer: here, and not in the step that all sequences share.
        """
        drafts = list(map(index, drafts[:limit]))
        if not drafts or (min(drafts) >= 0 and max(drafts) < self._vocab_size):
            return drafts
        return drafts[: next(i for i, token_id in enumerate(drafts) if not 0 <= token_id < self._vocab_size)]

    def _drop(self, rank: int, member: HostProposer, slot: int, error: Exception) -> None:
        """What drafts must not end what is drafted for."""
        self._drafting[slot] = tuple([other for other in self._drafting[slot] if other[0] != rank])
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
        if self._are_alone:  # there is nothing to choose from, and the device idles meanwhile
            batch.token_ids[places] = staged.ids
            batch.num_drafts[slots] = staged.counts
            return
        is_taken = (batch.num_drafts[slots] == 0) | (staged.ranks < batch.draft_rank[slots])
        batch.token_ids[places] = torch.where(is_taken[:, None], staged.ids, batch.token_ids[places])
        batch.num_drafts[slots] = torch.where(is_taken, staged.counts, batch.num_drafts[slots])
        if batch.draft_logits is not None:
            logits = batch.draft_logits[slots]
            certain = certain_logits(staged.ids, logits.shape[2]).to(logits.dtype)
            logits[:, : self._width] = torch.where(is_taken[:, None, None], certain, logits[:, : self._width])
            batch.draft_logits[slots] = logits
