"""Rows whose tokens a grammar decides about: where each stands, and what its next step may choose from.

A step of such a row is laid out once the one before has settled: then its text is known, and the drafts that
follow it. Position i of the step is masked by the grammar's state behind the first i drafts. A forbidden draft
needs no cutting: its probability is 0 there, so it is not kept, and what lies behind it is not looked at.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from server.guidance.grammar import Matcher
from server.guidance.masks import MaskJob, MaskWriter
from server.plan import PlanRow, RowResult, SequenceStart
from server.worker.flight import Flight
from server.worker.host_drafts import RankedDraft
from server.worker.stop_bits import StopBits
from server.worker.token_masks import TokenMasks

_NO_DRAFT = RankedDraft((), 0)


@dataclass(slots=True)
class _GuidedRow:
    """One slot's sequence. Attributes: draft: what the device has for its next step."""

    matcher: Matcher
    stops: StopBits
    stop_token_ids: frozenset[int]
    num_output: int = 0
    draft: RankedDraft = _NO_DRAFT

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that were generated; a stop id ends the text and is none of its tokens."""
        self.num_output += len(token_ids)
        stop = next((i for i, token_id in enumerate(token_ids) if token_id in self.stop_token_ids), len(token_ids))
        if stop:
            self.matcher.advance(token_ids[:stop])


class GuidedRows:
    """The matchers of the sequences in the batch; owned by the runner, on the step thread."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._rows: dict[int, _GuidedRow] = {}
        self._writer = MaskWriter()

    def start(self, start: SequenceStart) -> None:
        """A sequence takes a slot; one that was preempted goes on where its output ends."""
        request = start.request
        if request.grammar is None:
            self._rows.pop(start.slot, None)
            return
        row = _GuidedRow(request.grammar.start(), StopBits(request, self._num_words), request.stop_token_ids)
        row.advance(start.token_ids[start.num_prompt :])
        self._rows[start.slot] = row

    def stage(
        self, rows: Sequence[PlanRow], host_drafts: Mapping[int, RankedDraft], flight: Flight
    ) -> TokenMasks | None:
        """Put the masks of a step into its flight.

        Args:
            rows: those that sample, in layout order.
            host_drafts: by slot, what is about to go behind its known tokens from the host.
        Returns: None where nobody is guided.
        """
        if not self._rows:
            return None
        found = [(i, row, self._rows[row.slot]) for i, row in enumerate(rows) if row.slot in self._rows]
        if not found:
            return None
        drafts = [_taken(own.draft, host_drafts.get(row.slot))[: row.num_drafts] for _, row, own in found]
        jobs = [MaskJob(own.matcher, token_ids) for (_, _, own), token_ids in zip(found, drafts, strict=True)]
        num_positions = 1 + max(row.num_drafts for _, row, _ in found)
        masks = np.empty((len(jobs), num_positions, self._num_words), np.uint32)
        self._writer.write(jobs, masks)
        errors: dict[int, str] = {}
        for mask, (i, row, own) in zip(masks, found, strict=True):
            own.stops.apply(mask[: 1 + row.num_drafts], own.num_output)
            if (error := own.matcher.error()) is not None:
                errors[i] = f"its grammar cannot be followed any further: {error}"
                mask.fill(0xFFFFFFFF)
        return TokenMasks(
            rows=flight.put([i for i, _, _ in found]),
            bits=flight.put(masks.view(np.int32).ravel(), torch.int32).view(masks.shape),
            errors=errors,
        )

    def settle(self, rows: Sequence[PlanRow], results: Sequence[RowResult], drafts: Mapping[int, RankedDraft]) -> None:
        """Take in what a step brought.

        Args: rows: those of the plan, in the results' order. drafts: by slot, what lies behind the known tokens on the
            device, of which the first `num_next_drafts` are drafts.
        """
        if not self._rows:
            return
        for row, result in zip(rows, results, strict=True):
            own = self._rows.get(row.slot)
            if own is not None and result.token_ids:
                own.advance(result.token_ids)
                token_ids, rank = drafts.get(row.slot, _NO_DRAFT)
                own.draft = RankedDraft(token_ids[: result.num_next_drafts], rank)


def _taken(on_device: RankedDraft, on_host: RankedDraft | None) -> Sequence[int]:
    """The drafts that HostDrafting.apply leaves to be verified."""
    if on_host is not None and (not on_device.token_ids or on_host.rank < on_device.rank):
        return on_host.token_ids
    return on_device.token_ids
