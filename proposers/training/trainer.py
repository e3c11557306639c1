"""The loop: steps, reports, checkpoints."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from proposers.training.feature_source import FeatureSource
from proposers.training.objectives import Judged, Objective
from proposers.training.run_folder import RunFolder, RunState
from proposers.training.schedule import TrainSettings, batches, learning_rate, num_steps
from server.errors import ConfigError, OutriderError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """How often something is done besides steps, and when to leave off.

    Attributes:
        report_every, save_every: steps. stop_after_s: seconds after which the run is saved and left; None for never.
    """

    report_every: int = 20
    save_every: int = 500
    stop_after_s: float | None = None


@dataclass(slots=True)
class _Clock:
    """Time and places since the last report."""

    started_s: float
    reported_s: float
    num_places: int = 0


class Trainer:
    """Trains one head; used by one thread."""

    def __init__(
        self,
        objective: Objective,
        source: FeatureSource,
        num_rows: int,
        settings: TrainSettings,
        folder: RunFolder,
        to_target: Tensor,
    ) -> None:
        """Args: to_target: the head's vocabulary."""
        self._objective = objective
        self._source = source
        self._num_rows = num_rows
        self._settings = settings
        self._folder = folder
        self._to_target = to_target
        self._device = to_target.device
        self._parameters = [each for each in objective.trainee.parameters() if each.requires_grad]
        matrices = [each for each in self._parameters if each.dim() > 1]
        others = [each for each in self._parameters if each.dim() <= 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            fused=self._device.type == "cuda",
        )

    def run(self, pace: Pace, evaluate: Callable[[int], None] | None = None) -> bool:
        """Train on from the last checkpoint. Args: evaluate: called with the step, once a save and at the end.

        Returns: whether the run is over. Raises: OutriderError if the loss is no number any more.
        """
        total = num_steps(self._settings, self._num_rows)
        first = self._resume(total)
        clock = _Clock(time.monotonic(), time.monotonic())
        for step, rows in batches(self._settings, self._num_rows, first, total):
            is_reported = step % pace.report_every == 0 or step == total - 1
            judged = self._step(step, total, rows, is_detailed=is_reported)
            clock.num_places += len(rows) * self._settings.row_length
            if is_reported:
                self._report(step, total, judged, clock)
            is_late = pace.stop_after_s is not None and time.monotonic() - clock.started_s > pace.stop_after_s
            is_last = step + 1 == total
            if is_last or is_late or (step + 1) % pace.save_every == 0:
                self._folder.save(
                    RunState(step + 1, total, self._to_target.cpu()),
                    self._objective.trainee,
                    None if is_last else self._optimizer,
                )
                if evaluate is not None:
                    evaluate(step + 1)
            if is_late and not is_last:
                logger.info("left off after step %d of %d; run the same command again to go on", step + 1, total)
                return False
        return True

    def _resume(self, total: int) -> int:
        """Returns: the next step."""
        if (found := self._folder.load(self._device)) is None:
            return 0
        state, weights, optimizer = found
        if state.total != total or not torch.equal(state.to_target, self._to_target.cpu()):
            raise ConfigError(f"{self._folder.folder} was trained on other texts: name another folder, or delete it")
        self._objective.trainee.load_state_dict(dict(weights))
        if optimizer is not None:
            self._optimizer.load_state_dict(optimizer)
        logger.info("going on with step %d of %d", state.step, total)
        return state.step

    def _step(self, step: int, total: int, rows: Tensor, *, is_detailed: bool) -> Judged:
        taken, features = self._source.take(rows)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._settings, step, total)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            judged = self._objective.judge(taken, features, is_detailed=is_detailed)
        weights = self._settings.decay ** torch.arange(len(judged.loss), device=self._device)
        (judged.loss * weights).sum().div(weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.max_gradient)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return judged

    def _report(self, step: int, total: int, judged: Judged, clock: _Clock) -> None:
        """The only place that waits for the device."""
        assert judged.agreement is not None
        assert judged.overlap is not None
        loss, agreement, overlap = (each.tolist() for each in (judged.loss.detach(), judged.agreement, judged.overlap))
        if not all(math.isfinite(value) for value in loss):
            raise OutriderError(
                f"the loss is {loss} in step {step}: start again from the last checkpoint with a lower --learning-rate"
            )
        now = time.monotonic()
        rate = clock.num_places / max(now - clock.reported_s, 1e-9)
        left_s = (total - step - 1) * self._settings.batch_rows * self._settings.row_length / rate
        clock.reported_s, clock.num_places = now, 0
        self._folder.report({"what": "train", "step": step, "loss": loss, "agreement": agreement, "overlap": overlap})
        logger.info(
            "step %d/%d  loss %s  agreement %s  overlap %s  %.0f tokens/s  %.0f s left",
            step + 1,
            total,
            *(" ".join(f"{value:.3f}" for value in values) for values in (loss, agreement, overlap)),
            rate,
            left_s,
        )
