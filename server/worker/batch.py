"""The batch as the device knows it: persistent tensors with one row per slot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proposers.base import DraftVocabulary
from proposers.network import BatchMemory
from server.plan import PlanRow, SequenceStart
from server.worker.flight import Flight


@dataclass(frozen=True, slots=True)
class Starts:
    """Sequences that enter the batch, n of them, on their way to the device.

    Attributes:
        slots: [n] int64. integers: [7, n] int64, floats: [8, n] float32, max_drafts: [n] int32; the columns.
        token_ids, block_ids: for each sequence its own, int32.
    """

    slots: Tensor
    integers: Tensor
    floats: Tensor
    max_drafts: Tensor
    token_ids: Mapping[int, Tensor]
    block_ids: Mapping[int, Tensor]


@dataclass(frozen=True, slots=True)
class BatchChanges:
    """What a plan changes, on its way to the device.

    Attributes:
        starts: who enters. appended: [b] int64 places in the flat block table, and the [b] int32 blocks there.
    """

    starts: Starts | None
    appended: tuple[Tensor, Tensor] | None


class BatchState:
    """Device truth about every sequence in the batch; owned by the runner.

    The host never reads these tensors; it changes them by starts and appended blocks, a step
    changes them by what it generates.

    Attributes, S slots and one more, `spare_slot`, that padding rows name and nothing is ever read from:
        token_ids: [S + 1, width] int32; known tokens, then the drafts to be verified.
        num_tokens, num_computed, num_drafts: [S + 1] int64; known tokens, those with KV, drafts after them.
        block_table: [S + 1, max_blocks] int32; 0 beyond a sequence's blocks.
        num_prompt, first_stop, key, top_k: [S + 1] int64; first_stop is the first position a stop token may take.
        temperature, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty: [S + 1] float32; a
            temperature of 0 is greedy. noise: [S + 1] float32, 0 for those and 1 for others. is_rejecting: [S + 1]
            float32, 1 for those of noise and no seed, whose drafts the rejection rule may judge.
        max_drafts: [S + 1] int32; most drafts to propose.
        draft_rank: [S + 1] int64; which of several proposers on the device the drafts are from.
        draft_logits: [S + 1, k, size of the draft vocabulary], what the drafts were drawn from; None where they are
            certain.
    """

    def __init__(
        self,
        num_slots: int,
        max_tokens: int,
        block_size: int,
        max_drafts: int,
        device: torch.device,
        draft_vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """Args: max_tokens: longest sequence; the token row has room for a step's overshoot beyond it."""
        self.spare_slot = num_slots
        self._num_blocks = [0] * num_slots
        num_rows = num_slots + 1
        self.width = max_tokens + 2 * (max_drafts + 1)
        self._max_blocks = -(-max_tokens // block_size)
        self.token_ids = torch.zeros(num_rows, self.width, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(num_rows, self._max_blocks, dtype=torch.int32, device=device)
        self._flat_table = self.block_table.view(-1)
        self._integers = torch.zeros(7, num_rows, dtype=torch.int64, device=device)
        self._floats = torch.zeros(8, num_rows, dtype=torch.float32, device=device)
        self.num_tokens, self.num_computed, self.num_drafts = self._integers[:3]
        self.num_prompt, self.first_stop, self.key, self.top_k = self._integers[3:]
        self.temperature, self.noise, self.top_p, self.min_p = self._floats[:4]
        self.repetition_penalty, self.frequency_penalty, self.presence_penalty = self._floats[4:7]
        self.is_rejecting = self._floats[7]
        self.max_drafts = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.draft_rank = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.draft_logits: Tensor | None = None
        if draft_vocabulary is not None:
            shape = num_rows, max_drafts, draft_vocabulary.size
            self.draft_logits = torch.zeros(shape, dtype=draft_vocabulary.dtype, device=device)

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, for whoever wants to save and restore the state."""
        logits = () if self.draft_logits is None else (self.draft_logits,)
        return (
            *(self.token_ids, self.block_table, self._integers, self._floats, self.max_drafts, self.draft_rank),
            *logits,
        )

    def memory(self, *, num_blocks: int, block_size: int) -> BatchMemory:
        """What proposers may read of it, beside KV of so many blocks."""
        return BatchMemory(self.token_ids, self.block_table, self.num_tokens, self.num_computed, num_blocks, block_size)

    def stage(self, starts: Sequence[SequenceStart], rows: Sequence[PlanRow], flight: Flight) -> BatchChanges:
        """Put what a plan changes into its flight."""
        for start in starts:
            self._num_blocks[start.slot] = len(start.block_ids)
        places: list[int] = []
        block_ids: list[int] = []
        for row in rows:
            if row.new_block_ids:
                first = row.slot * self._max_blocks + self._num_blocks[row.slot]
                self._num_blocks[row.slot] += len(row.new_block_ids)
                places += range(first, first + len(row.new_block_ids))
                block_ids += row.new_block_ids
        return BatchChanges(
            _stage_starts(starts, flight) if starts else None,
            (flight.put(places), flight.put(block_ids, torch.int32)) if places else None,
        )

    def apply(self, changes: BatchChanges) -> None:
        """Take in what was staged, once its flight was sent."""
        starts = changes.starts
        if starts is not None:
            self._integers.index_copy_(1, starts.slots, starts.integers)
            self._floats.index_copy_(1, starts.slots, starts.floats)
            self.max_drafts.index_copy_(0, starts.slots, starts.max_drafts)
            for slot, token_ids in starts.token_ids.items():
                self.token_ids[slot, : token_ids.shape[0]] = token_ids
            for slot, block_ids in starts.block_ids.items():
                self.block_table[slot].zero_()
                self.block_table[slot, : block_ids.shape[0]] = block_ids
        if changes.appended is not None:
            self._flat_table.index_copy_(0, *changes.appended)


def _stage_starts(starts: Sequence[SequenceStart], flight: Flight) -> Starts:
    integers, floats = list(map(_integers, starts)), list(map(_floats, starts))
    return Starts(
        slots=flight.put([start.slot for start in starts]),
        integers=flight.put([row[i] for i in range(len(integers[0])) for row in integers]).view(-1, len(starts)),
        floats=flight.put([row[i] for i in range(len(floats[0])) for row in floats], torch.float32).view(
            -1, len(starts)
        ),
        max_drafts=flight.put([start.num_speculative_tokens for start in starts], torch.int32),
        token_ids={start.slot: flight.put(start.token_ids, torch.int32) for start in starts},
        block_ids={start.slot: flight.put(start.block_ids, torch.int32) for start in starts},
    )


def _integers(start: SequenceStart) -> tuple[int, ...]:
    """The integer columns of a sequence, in the order of BatchState."""
    sampling = start.request.sampling
    first_stop = start.num_prompt + sampling.min_tokens
    return len(start.token_ids), start.num_computed, 0, start.num_prompt, first_stop, start.key, sampling.top_k


def _floats(start: SequenceStart) -> tuple[float, ...]:
    """The float columns of a sequence, in the order of BatchState."""
    sampling = start.request.sampling
    return (
        0.0 if sampling.is_greedy else sampling.temperature,
        0.0 if sampling.is_greedy else 1.0,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
        0.0 if sampling.is_greedy or sampling.seed is not None else 1.0,
    )
