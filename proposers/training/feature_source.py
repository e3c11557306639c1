"""Where a training step gets the target's features from: kept on the device where they fit, else computed again."""

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
        """Args: rows: [n] int64, on the device."""


class RecomputedFeatures:
    """Asks the target each time."""

    def __init__(self, rows: PackedRows, target: TargetFeatures) -> None:
        """Args: rows: on the target's device."""
        self._rows = rows
        self._target = target

    def take(self, rows: Tensor) -> tuple[PackedRows, Features]:
        """Some rows."""
        taken = self._rows.take(rows)
        return taken, self._target.compute(taken)


class KeptFeatures:
    """Asks the target once, for everything."""

    def __init__(self, rows: PackedRows, target: TargetFeatures, rows_at_a_time: int) -> None:
        """Args: rows: on the target's device."""
        self._rows = rows
        self._kept: Features | None = None
        for index in torch.arange(rows.num_rows, device=rows.token_ids.device).split(rows_at_a_time):
            part = target.compute(rows.take(index))
            if self._kept is None:
                self._kept = Features(*[piece.new_empty(rows.num_rows, *piece.shape[1:]) for piece in part])
            for kept, piece in zip(self._kept, part, strict=True):
                kept[index] = piece

    def take(self, rows: Tensor) -> tuple[PackedRows, Features]:
        """Some rows."""
        assert self._kept is not None, "there is at least one row"
        return self._rows.take(rows), Features(*[kept[rows] for kept in self._kept])


def feature_source(rows: PackedRows, target: TargetFeatures, rows_at_a_time: int) -> FeatureSource:
    """Keep the features of all rows if the device has the memory. Args: rows: on the target's device."""
    device = rows.token_ids.device
    nbytes = target.nbytes_per_place * rows.token_ids.numel()
    room = int(torch.cuda.mem_get_info(device)[0] * _SHARE) if device.type == "cuda" else _CPU_NBYTES
    if nbytes > room:
        logger.info(
            "features: %d MiB are too many for %d MiB: computed in each step",
            nbytes >> 20,
            room >> 20,
        )
        return RecomputedFeatures(rows, target)
    logger.info("features: %d MiB, kept on %s", nbytes >> 20, device)
    return KeptFeatures(rows, target, rows_at_a_time)
