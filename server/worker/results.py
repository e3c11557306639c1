"""A launched step's outcome: device tensors on their way to the host, then plain values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from server.engine.protocol import PositionLogprobs
from server.plan import PlanRow, RowResult, StepResult
from server.worker.logprobs import LogprobTensors
from server.worker.step_inputs import SamplingRows, StepInputs
from server.worker.transfer import Transfer

NOT_FINITE = "the model produced NaN or infinite values"


@dataclass(frozen=True, slots=True)
class SampledTensors:
    """What the sampling rows brought, M of them.

    Attributes:
        token_ids: [M, Q] int64, accepted drafts and the token after them.
        num_tokens, num_drafted, num_next_drafts: [M] int64.
        is_broken: [M] bool, rows that went NaN or infinite where it matters.
        is_empty: [M] bool, rows that are left without a token to choose.
        logprobs: Q positions for each row that reports, in order.
        failures: by index of a row, what its logits processing raised.
    """

    token_ids: Tensor
    num_tokens: Tensor
    num_drafted: Tensor
    num_next_drafts: Tensor
    is_broken: Tensor
    is_empty: Tensor
    logprobs: LogprobTensors | None
    failures: Mapping[int, str]

    def download(self, transfer: Transfer) -> "SampledTensors":
        """Host copies, valid after the step's event."""
        download = transfer.download
        return SampledTensors(
            token_ids=download(self.token_ids),
            num_tokens=download(self.num_tokens),
            num_drafted=download(self.num_drafted),
            num_next_drafts=download(self.num_next_drafts),
            is_broken=download(self.is_broken),
            is_empty=download(self.is_empty),
            logprobs=None if self.logprobs is None else self.logprobs.download(transfer),
            failures=self.failures,
        )

    def row_fields(self, sampling: SamplingRows) -> dict[int, dict[str, Any]]:
        """Fields of each sampling row's RowResult, by slot; on the host."""
        num_drafted, num_next_drafts = self.num_drafted.tolist(), self.num_next_drafts.tolist()
        counts, is_broken, is_empty = self.num_tokens.tolist(), self.is_broken.tolist(), self.is_empty.tolist()
        fields: dict[int, dict[str, Any]] = {}
        for i, (row, token_ids) in enumerate(zip(sampling.rows, self.token_ids.tolist(), strict=True)):
            if i in self.failures:
                fields[row.slot] = {"error": self.failures[i]}
            elif is_broken[i]:
                fields[row.slot] = {"error": NOT_FINITE}
            elif is_empty[i]:
                fields[row.slot] = {"error": "its rules leave no token to choose", "is_refusal": True}
            else:
                fields[row.slot] = {
                    "token_ids": tuple(token_ids[: counts[i]]),
                    "num_drafted": num_drafted[i],
                    "num_next_drafts": num_next_drafts[i],
                    "logprobs": self._row_logprobs(sampling, i, counts[i]),
                }
        return fields

    def _row_logprobs(self, sampling: SamplingRows, index: int, count: int) -> tuple[PositionLogprobs, ...]:
        num_top = sampling.params[index].logprobs
        if self.logprobs is None or sampling.reporting is None or num_top is None:
            return ()
        first = sampling.reporting.index.index(index) * sampling.num_positions
        return self.logprobs.positions(first, count, num_top)


@dataclass(frozen=True, slots=True)
class StepTensors:
    """All that a step brought.

    Attributes:
        is_broken: [N] bool, rows with NaN or infinite activations, in layout order.
        prompt_logprobs: by index of a row, its prompt positions.
    """

    is_broken: Tensor
    sampled: SampledTensors | None
    prompt_logprobs: Mapping[int, LogprobTensors]

    def download(self, transfer: Transfer) -> "StepTensors":
        """Host copies, valid after the step's event."""
        return StepTensors(
            is_broken=transfer.download(self.is_broken),
            sampled=None if self.sampled is None else self.sampled.download(transfer),
            prompt_logprobs={i: tensors.download(transfer) for i, tensors in self.prompt_logprobs.items()},
        )


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A step that was launched; its tensors are on the host once the event has passed."""

    inputs: StepInputs
    tensors: StepTensors
    event: torch.cuda.Event | None

    def settle(self) -> StepResult:
        """Wait for the device, then turn the outcome into values; in layout order."""
        if self.event is not None:
            self.event.synchronize()
        sampling, sampled = self.inputs.sampling, self.tensors.sampled
        by_slot = {} if sampling is None or sampled is None else sampled.row_fields(sampling)
        results: list[RowResult] = []
        for i, (row, is_broken) in enumerate(zip(self.inputs.rows, self.tensors.is_broken.tolist(), strict=True)):
            if is_broken:
                fields: dict[str, Any] = {"error": NOT_FINITE}
            else:
                fields = {"prompt_logprobs": self._prompt_logprobs(i, row), **by_slot.get(row.slot, {})}
            results.append(RowResult(row.seq_id, row.epoch, **fields))
        return StepResult(tuple(results))

    def _prompt_logprobs(self, index: int, row: PlanRow) -> tuple[PositionLogprobs, ...]:
        tensors = self.tensors.prompt_logprobs.get(index)
        if tensors is None or row.num_prompt_logprobs is None:
            return ()
        return tensors.positions(0, tensors.chosen_ids.shape[0], row.num_prompt_logprobs)
