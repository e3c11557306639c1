"""The batch as the device knows it: persistent tensors with one row per slot."""

from collections.abc import Sequence

import torch
from torch import Tensor

from server.plan import PlanRow, SequenceStart
from server.worker.transfer import Transfer


class BatchState:
    """Device truth about every sequence in the batch; owned by the runner.

    The host never reads these tensors; it changes them by starts and appended blocks, a step
    changes them by what it generates.

    Attributes, S slots:
        token_ids: [S, width] int32; known tokens, then the drafts to be verified.
        num_tokens, num_computed, num_drafts: [S] int64; known tokens, those with KV, drafts after them.
        block_table: [S, max_blocks] int32; 0 beyond a sequence's blocks.
        num_prompt, first_stop, key, top_k: [S] int64; first_stop is the first position a stop token may take.
        temperature, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty: [S] float32.
        max_drafts: [S] int32; most drafts to propose.
    """

    def __init__(self, num_slots: int, max_tokens: int, block_size: int, max_drafts: int, transfer: Transfer) -> None:
        """Args: max_tokens: longest sequence; the token row has room for a step's overshoot beyond it."""
        device = transfer.device
        self._transfer = transfer
        self._num_blocks = [0] * num_slots
        self.width = max_tokens + 2 * (max_drafts + 1)
        self.token_ids = torch.zeros(num_slots, self.width, dtype=torch.int32, device=device)
        max_blocks = -(-max_tokens // block_size)
        self.block_table = torch.zeros(num_slots, max_blocks, dtype=torch.int32, device=device)

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_slots, dtype=dtype, device=device)

        self.num_tokens, self.num_computed, self.num_drafts = (column(torch.int64) for _ in range(3))
        self.num_prompt, self.first_stop = (column(torch.int64) for _ in range(2))
        self.key, self.top_k = (column(torch.int64) for _ in range(2))
        self.temperature, self.top_p, self.min_p = (column(torch.float32) for _ in range(3))
        self.repetition_penalty, self.frequency_penalty = (column(torch.float32) for _ in range(2))
        self.presence_penalty = column(torch.float32)
        self.max_drafts = column(torch.int32)

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, for whoever wants to save and restore the state."""
        return tuple(value for value in vars(self).values() if isinstance(value, Tensor))

    def start(self, starts: Sequence[SequenceStart]) -> None:
        """Fill the slots of sequences that enter the batch."""
        if not starts:
            return
        upload = self._transfer.upload
        slots = self._transfer.upload_ids([start.slot for start in starts])
        sampling = [start.request.sampling for start in starts]
        for column, values in (
            (self.num_tokens, [len(start.token_ids) for start in starts]),
            (self.num_computed, [start.num_computed for start in starts]),
            (self.num_drafts, [0] * len(starts)),
            (self.num_prompt, [start.num_prompt for start in starts]),
            (self.first_stop, [start.num_prompt + start.request.sampling.min_tokens for start in starts]),
            (self.key, [start.key for start in starts]),
            (self.top_k, [params.top_k for params in sampling]),
            (self.temperature, [params.temperature for params in sampling]),
            (self.top_p, [params.top_p for params in sampling]),
            (self.min_p, [params.min_p for params in sampling]),
            (self.repetition_penalty, [params.repetition_penalty for params in sampling]),
            (self.frequency_penalty, [params.frequency_penalty for params in sampling]),
            (self.presence_penalty, [params.presence_penalty for params in sampling]),
            (self.max_drafts, [start.num_speculative_tokens for start in starts]),
        ):
            column[slots] = upload(values, column.dtype)
        for start in starts:
            self.token_ids[start.slot, : len(start.token_ids)] = upload(start.token_ids, torch.int32)
            self.block_table[start.slot].zero_()
            self.block_table[start.slot, : len(start.block_ids)] = upload(start.block_ids, torch.int32)
            self._num_blocks[start.slot] = len(start.block_ids)

    def append_blocks(self, rows: Sequence[PlanRow]) -> None:
        """Append each row's new blocks to its table."""
        slots: list[int] = []
        columns: list[int] = []
        block_ids: list[int] = []
        for row in rows:
            first = self._num_blocks[row.slot]
            self._num_blocks[row.slot] = first + len(row.new_block_ids)
            slots += [row.slot] * len(row.new_block_ids)
            columns += range(first, self._num_blocks[row.slot])
            block_ids += row.new_block_ids
        if slots:
            upload_ids = self._transfer.upload_ids
            self.block_table[upload_ids(slots), upload_ids(columns)] = self._transfer.upload(block_ids, torch.int32)
