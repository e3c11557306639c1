"""A launched step's outcome: device tensors on their way to the host, then plain values."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from server.engine.protocol import PositionLogprobs
from server.plan import PlanRow, RowResult, StepResult
from server.worker.draft_time import DraftSpan
from server.worker.drafting import CaughtUp
from server.worker.flight import Flight
from server.worker.generation import NUM_COUNTS, Generated
from server.worker.host_drafts import RankedDraft
from server.worker.logprobs import LogprobTensors
from server.worker.step_inputs import SamplingRows, StepInputs
from server.worker.transfer import Transfer

NOT_FINITE = "the model produced NaN or infinite values"
NO_TOKEN_LEFT = "its rules leave no token to choose"
_FINE = RowResult(seq_id=0, epoch=0)[5:]
"""How the result of a row ends that reports nothing: without log probabilities, without an error."""


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """All that a step brought.

    Attributes:
        packed: 1-d int64; where rows were checked for NaN, [N] whether they are broken; then what was generated,
            see Generated.columns, with its next_drafts behind.
        logprobs, failures: see Generated.
        draft_span: see Generated.
        prompt_logprobs: by index of a row, its prompt positions.
        num_draft_columns: of next_drafts, 0 without.
    """

    packed: Tensor
    logprobs: LogprobTensors | None
    failures: Mapping[int, str]
    draft_span: DraftSpan
    prompt_logprobs: Mapping[int, LogprobTensors]
    num_draft_columns: int = 0

    def with_next_drafts(self, next_drafts: Tensor) -> "StepOutputs":
        """The same with drafts that the host is to know behind. Args: next_drafts: see Generated."""
        packed = torch.cat((self.packed, next_drafts.view(-1)))
        return replace(self, packed=packed, num_draft_columns=next_drafts.shape[1])

    @classmethod
    def of(
        cls, is_broken: Tensor | None, generated: Generated, prompt_logprobs: Mapping[int, LogprobTensors]
    ) -> "StepOutputs":
        """Pack the outcome of the two segments."""
        checked = () if is_broken is None else (is_broken.long(),)
        columns, next_drafts = (*checked, *generated.columns), generated.next_drafts
        packed = torch.cat(columns if next_drafts is None else (*columns, next_drafts.view(-1)))
        num_draft_columns = 0 if next_drafts is None else next_drafts.shape[1]
        return cls(
            packed, generated.logprobs, generated.failures, generated.draft_span, prompt_logprobs, num_draft_columns
        )


class StepHandle:
    """A launched step; one settles it once, after which its flight may be used again.

    Attributes:
        rows: the plan's rows in the order of the result's.
        proposes: whether the plan wanted drafts for the step after it.
        caught_up: what it did besides for earlier steps.
    """

    def __init__(
        self,
        inputs: StepInputs,
        outputs: StepOutputs,
        flight: Flight,
        transfer: Transfer,
        *,
        proposes: bool,
        caught_up: CaughtUp,
    ) -> None:
        """Begin to bring the outputs to the host."""
        self.flight = flight
        self.proposes = proposes
        self.caught_up = caught_up
        self.rows = inputs.rows
        self._inputs = inputs
        self._failures = outputs.failures
        self._draft_span = outputs.draft_span
        self._num_draft_columns = outputs.num_draft_columns
        self._logprobs = None if outputs.logprobs is None else outputs.logprobs.download(transfer)
        self._prompt_logprobs = {i: tensors.download(transfer) for i, tensors in outputs.prompt_logprobs.items()}
        flight.bring_back(outputs.packed)

    def settle(self) -> StepResult:
        """Wait for the device, then turn the outcome into values; in layout order."""
        values = self.flight.results()
        rows, sampling = self._inputs.rows, self._inputs.sampling
        if self._inputs.known_row is None:
            assert sampling is not None
            return self._result(self._sampled(sampling, values))
        sampled = iter(()) if sampling is None else iter(self._sampled(sampling, values[len(rows) :]))
        results: list[RowResult] = []
        for i, (row, is_broken) in enumerate(zip(rows, values[: len(rows)].tolist(), strict=True)):
            result = next(sampled) if row.is_sampling else RowResult(row.seq_id, row.epoch)
            if is_broken:
                result = RowResult(row.seq_id, row.epoch, error=NOT_FINITE)
            elif i in self._prompt_logprobs and result.error is None:
                result = self._with_prompt_logprobs(result, row, self._prompt_logprobs[i])
            results.append(result)
        return self._result(results)

    def _result(self, rows: Sequence[RowResult]) -> StepResult:
        num_caught_up, catching_up = self.caught_up
        return StepResult(tuple(rows), catching_up.seconds() + self._draft_span.seconds(), num_caught_up)

    def next_drafts(self) -> dict[int, RankedDraft]:
        """By slot, what lies behind the known tokens of rows on the device, whether drafts or not; waits for it.

        Of steps with guided rows; empty for others.
        """
        sampling, width = self._inputs.sampling, self._num_draft_columns
        if sampling is None or width == 0:
            return {}
        drafts = self.flight.results()[-width * sampling.slots.shape[0] :].reshape(-1, width).tolist()
        return {row.slot: RankedDraft(ids, rank) for row, (rank, *ids) in zip(sampling.rows, drafts, strict=False)}

    def _sampled(self, sampling: SamplingRows, values: npt.NDArray[np.int64]) -> list[RowResult]:
        """The results of the sampling rows, in order; padding behind them is dropped."""
        num_rows, width = sampling.slots.shape[0], sampling.num_positions
        first_id, first_score = NUM_COUNTS * num_rows, (NUM_COUNTS + width) * num_rows
        integers: list[int] = values[:first_score].tolist()
        counts = [integers[i : i + num_rows] for i in range(0, first_id, num_rows)]
        scores: list[float] = values[first_score : first_score + num_rows * width].view(np.float64).tolist()
        ids = integers[first_id:]
        rows = zip(sampling.rows, range(0, len(ids), width), *counts, strict=False)
        is_finite = all(map(math.isfinite, scores[: len(sampling.rows) * width]))
        has_errors = bool(self._failures or (sampling.masks is not None and sampling.masks.errors))
        if is_finite and self._logprobs is None and not has_errors:
            new = tuple.__new__  # which the constructor of a named tuple calls, in half the time
            return [
                new(
                    RowResult,
                    (
                        row.seq_id,
                        row.epoch,
                        tuple(ids[first : first + accepted + 1]) if accepted else (ids[first],),
                        drafted,
                        next_drafts,
                        *_FINE,
                    ),
                )
                for row, first, accepted, drafted, next_drafts in rows
            ]
        results: list[RowResult] = []
        for i, (row, first, accepted, drafted, next_drafts) in enumerate(rows):
            used = slice(first, first + accepted + 1)
            logprobs = self._chosen_logprobs(sampling, i, accepted + 1)
            results.append(
                self._failed(sampling, i, scores[used])
                or RowResult(row.seq_id, row.epoch, tuple(ids[used]), drafted, next_drafts, logprobs)
            )
        return results

    def _failed(self, sampling: SamplingRows, index: int, scores: list[float]) -> RowResult | None:
        """The result of a row without usable tokens; None if it is fine. Scores beyond its tokens do not matter."""
        row = sampling.rows[index]
        if sampling.masks is not None and index in sampling.masks.errors:
            return RowResult(row.seq_id, row.epoch, error=sampling.masks.errors[index], is_refusal=True)
        if index in self._failures:
            return RowResult(row.seq_id, row.epoch, error=self._failures[index])
        if not all(score < math.inf for score in scores):
            return RowResult(row.seq_id, row.epoch, error=NOT_FINITE)
        if -math.inf in scores:
            return RowResult(row.seq_id, row.epoch, error=NO_TOKEN_LEFT, is_refusal=True)
        return None

    def _chosen_logprobs(self, sampling: SamplingRows, index: int, count: int) -> tuple[PositionLogprobs, ...]:
        num_top = sampling.infos[index].params.logprobs
        if self._logprobs is None or sampling.reporting is None or num_top is None:
            return ()
        first = sampling.reporting.index.index(index) * sampling.num_positions
        return self._logprobs.positions(first, count, num_top)

    def _with_prompt_logprobs(self, result: RowResult, row: PlanRow, tensors: LogprobTensors) -> RowResult:
        assert row.num_prompt_logprobs is not None
        positions = tensors.positions(0, tensors.chosen_ids.shape[0], row.num_prompt_logprobs)
        return result._replace(prompt_logprobs=positions)
