"""A launched step's outcome: device tensors on their way to the host, then plain values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from server.engine.protocol import PositionLogprobs
from server.plan import PlanRow, RowResult, StepResult
from server.worker.logprobs import LogprobTensors


@dataclass(frozen=True, slots=True)
class SampledTensors:
    """What the sampling rows brought, M of them: host copies that are valid after the step's event.

    Attributes:
        slots: whose rows they are.
        failures: by index, what a row's logits processing raised.
        token_ids: [M, Q] int64, accepted drafts and the token after them.
        num_tokens, num_drafted, num_next_drafts: [M] int64.
        is_broken: [M] bool, rows without a single finite logit.
        logprobs: Q positions for each row that has an entry in `num_top`, in its order.
        num_top: by index of a row, how many of the likeliest tokens it reports.
    """

    slots: tuple[int, ...]
    failures: Mapping[int, str]
    token_ids: Tensor
    num_tokens: Tensor
    num_drafted: Tensor
    num_next_drafts: Tensor
    is_broken: Tensor
    logprobs: LogprobTensors | None
    num_top: Mapping[int, int]

    def row_fields(self) -> dict[int, dict[str, Any]]:
        """Fields of each sampling row's RowResult, by slot."""
        num_drafted, num_next_drafts = self.num_drafted.tolist(), self.num_next_drafts.tolist()
        counts, is_broken = self.num_tokens.tolist(), self.is_broken.tolist()
        fields: dict[int, dict[str, Any]] = {}
        for i, (slot, token_ids) in enumerate(zip(self.slots, self.token_ids.tolist(), strict=True)):
            if i in self.failures:
                fields[slot] = {"error": self.failures[i]}
            elif is_broken[i]:
                fields[slot] = {"error": "no token is left to choose: every logit is NaN or minus infinity"}
            else:
                fields[slot] = {
                    "token_ids": tuple(token_ids[: counts[i]]),
                    "num_drafted": num_drafted[i],
                    "num_next_drafts": num_next_drafts[i],
                    "logprobs": self._row_logprobs(i, counts[i]),
                }
        return fields

    def _row_logprobs(self, index: int, count: int) -> tuple[PositionLogprobs, ...]:
        if self.logprobs is None or index not in self.num_top:
            return ()
        first = list(self.num_top).index(index) * self.token_ids.shape[1]
        return self.logprobs.positions(first, count, self.num_top[index])


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A step that was launched.

    Attributes:
        rows: in layout order, N of them.
        is_broken: [N] bool, rows with NaN or infinite activations.
        prompt_logprobs: by index of a row, its prompt positions.
    """

    rows: tuple[PlanRow, ...]
    is_broken: Tensor
    sampled: SampledTensors | None
    prompt_logprobs: Mapping[int, LogprobTensors]
    event: torch.cuda.Event | None

    def settle(self) -> StepResult:
        """Wait for the device, then turn the outcome into values; in layout order."""
        if self.event is not None:
            self.event.synchronize()
        sampled = {} if self.sampled is None else self.sampled.row_fields()
        results: list[RowResult] = []
        for i, (row, is_broken) in enumerate(zip(self.rows, self.is_broken.tolist(), strict=True)):
            if is_broken:
                fields: dict[str, Any] = {"error": "the model produced NaN or infinite values"}
            else:
                fields = {"prompt_logprobs": self._prompt_logprobs(i, row), **sampled.get(row.slot, {})}
            results.append(RowResult(row.seq_id, row.epoch, **fields))
        return StepResult(tuple(results))

    def _prompt_logprobs(self, index: int, row: PlanRow) -> tuple[PositionLogprobs, ...]:
        tensors = self.prompt_logprobs.get(index)
        if tensors is None or row.num_prompt_logprobs is None:
            return ()
        return tensors.positions(0, tensors.chosen_ids.shape[0], row.num_prompt_logprobs)
