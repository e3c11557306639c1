"""Drafts that are made on the host, between a step's settling and the launch of the sequences' next one."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proposers.base import HostProposer, SequenceText
from server.plan import PlanRow, RowResult, SequenceStart, StepResult
from server.worker.batch import BatchState
from server.worker.flight import Flight

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedDrafts:
    """Drafts of n slots on their way to the device: [n] int64 slots and counts, [n, k] int32 ids, 0 behind them."""

    slots: Tensor
    counts: Tensor
    ids: Tensor


class HostDrafting:
    """A host proposer with the batch; owned by the runner.

    Settled tokens go to the proposer, and its drafts behind the known tokens, where those of the device are too.
    """

    def __init__(self, proposer: HostProposer, batch: BatchState, vocab_size: int) -> None:
        self._proposer = proposer
        self._batch = batch
        self._vocab_size = vocab_size
        self._max_drafts: dict[int, int] = {}
        self._drafts: dict[int, Sequence[int]] = {}
        device = batch.num_tokens.device
        self._offsets = torch.arange(proposer.num_speculative_tokens, device=device)

    def start(self, start: SequenceStart) -> None:
        """A sequence takes a slot."""
        slot = start.slot
        self._max_drafts.pop(slot, None)
        self._drafts.pop(slot, None)
        if start.num_speculative_tokens == 0:
            return
        text = SequenceText(start.token_ids, start.num_prompt, start.request.cache_salt)
        try:
            self._proposer.start(slot, text)
        except Exception as error:
            self._note_failure(slot, error)
        else:
            self._max_drafts[slot] = start.num_speculative_tokens

    def advance(self, rows: Sequence[PlanRow], result: StepResult) -> StepResult:
        """Draft behind the tokens of a settled step.

        Args: rows: those of the plan, in the result's order.
        Returns: the result with the drafts counted.
        """
        return StepResult(tuple([self._advance_row(*pair) for pair in zip(rows, result.rows, strict=True)]))

    def _advance_row(self, row: PlanRow, result: RowResult) -> RowResult:
        slot = row.slot
        if slot not in self._max_drafts or not result.token_ids:
            return result
        try:
            self._proposer.extend(slot, result.token_ids)
            drafts = self._usable(self._proposer.propose(slot, self._max_drafts[slot]), self._max_drafts[slot])
        except Exception as error:
            self._note_failure(slot, error)
            return result
        if not drafts:
            return result
        self._drafts[slot] = drafts
        return result._replace(num_next_drafts=len(drafts))

    def _usable(self, drafts: Sequence[int], max_drafts: int) -> Sequence[int]:
        """The drafts up to the first that no model has an embedding for."""
        limit = min(max_drafts, self._proposer.num_speculative_tokens)
        outside = [i for i, token_id in enumerate(drafts) if not 0 <= token_id < self._vocab_size]
        return drafts[: min([limit, *outside])]

    def _note_failure(self, slot: int, error: Exception) -> None:
        """What drafts must not end what is drafted for."""
        self._max_drafts.pop(slot, None)
        name = type(self._proposer).__name__
        logger.error("%s failed; it drafts no more for one sequence", name, exc_info=error)

    def stage(self, rows: Sequence[PlanRow], flight: Flight) -> StagedDrafts | None:
        """Put the drafts of a plan's rows into its flight."""
        slots = [row.slot for row in rows if row.slot in self._drafts]
        if not slots:
            return None
        drafts = [self._drafts.pop(slot) for slot in slots]
        width = self._proposer.num_speculative_tokens
        ids = [token_id for each in drafts for token_id in [*each, *[0] * (width - len(each))]]
        return StagedDrafts(
            flight.put(slots),
            flight.put([len(each) for each in drafts]),
            flight.put(ids, torch.int32).view(len(slots), width),
        )

    def apply(self, staged: StagedDrafts) -> None:
        """Put what was staged behind the known tokens, once its flight was sent."""
        batch, slots = self._batch, staged.slots
        ahead = batch.num_tokens[slots][:, None] + self._offsets
        batch.token_ids[slots[:, None], ahead] = staged.ids
        batch.num_drafts[slots] = staged.counts
