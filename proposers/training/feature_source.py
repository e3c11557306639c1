"""Where a training step gets the target's features from: kept on the device as far as they fit, else computed again."""

import logging
from typing import Protocol

import torch
from torch import Tensor

from proposers.training.packing import PackedRows
from proposers.training.target import Features, TargetFeatures

logger = logging.getLogger(__name__)

_SHARE = 0.75
"""Of the memory that is free on a GPU; the rest is for training."""
_CPU_NBYTES = 1 << 30


class FeatureSource(Protocol):
    """Gives rows and their features."""

    def take(self, rows: Tensor) -> tuple[PackedRows, Features]:
        """Some rows, in an order of its own. Args: rows: [n] int64, on the CPU."""


class RecomputedFeatures:
    """Asks the target each time."""

    def __init__(self, rows: PackedRows, target: TargetFeatures) -> None:
        """Args: rows: on the target's device."""
        self._rows = rows
        self._target = target

    def take(self, rows: Tensor) -> tuple[PackedRows, Features]:
        """As they were asked for."""
        taken = self._rows.take(rows.to(self._rows.token_ids.device))
        return taken, self._target.compute(taken)


class KeptFeatures:
    """Asks the target once for the first rows, and each time for the others."""

    def __init__(
        self, rows: PackedRows, target: TargetFeatures, rows_at_a_time: int, num_kept: int | None = None
    ) -> None:
        """Args: rows: on the target's device. num_kept: at least 1; all if None."""
        self._rows = rows
        self._others = RecomputedFeatures(rows, target)
        self._num_kept = rows.num_rows if num_kept is None else num_kept
        self._kept: Features | None = None
        for index in torch.arange(self._num_kept, device=rows.token_ids.device).split(rows_at_a_time):
            part = target.compute(rows.take(index))
            if self._kept is None:
                self._kept = Features(*[piece.new_empty(self._num_kept, *piece.shape[1:]) for piece in part])
            for kept, piece in zip(self._kept, part, strict=True):
                kept[index] = piece

    def take(self, rows: Tensor) -> tuple[PackedRows, Features]:
        """Those that are kept come first."""
        assert self._kept is not None, "at least one row is kept"
        is_kept = rows < self._num_kept
        known = rows[is_kept].to(self._rows.token_ids.device)
        features = Features(*[kept[known] for kept in self._kept])
        if len(known) == len(rows):
            return self._rows.take(known), features
        others, computed = self._others.take(rows[~is_kept])
        return self._rows.take(known).followed_by(others), Features(*map(_joined, features, computed))


def _joined(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat((first, second))


def feature_source(rows: PackedRows, target: TargetFeatures, rows_at_a_time: int) -> FeatureSource:
    """Keep the features of as many rows as the device has the memory for. Args: rows: on the target's device."""
    device = rows.token_ids.device
    nbytes_per_row = target.nbytes_per_place * rows.row_length
    room = int(torch.cuda.mem_get_info(device)[0] * _SHARE) if device.type == "cuda" else _CPU_NBYTES
    num_kept = min(rows.num_rows, room // nbytes_per_row)
    logger.info(
        "features: %d MiB, of %d in %d rows kept on %s, the others computed in each step",
        rows.num_rows * nbytes_per_row >> 20,
        num_kept,
        rows.num_rows,
        device,
    )
    if num_kept == 0:
        return RecomputedFeatures(rows, target)
    return KeptFeatures(rows, target, rows_at_a_time, num_kept)
