"""How a run goes: its settings, its order of rows, its rate."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

Kind = Literal["eagle3", "medusa"]


class TrainSettings(BaseModel):
    """Settings of a training run; a run is resumed with the same ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind = Field(default="eagle3", description="what is trained: an EAGLE-3 head, or Medusa heads")
    init: Path | None = Field(
        default=None, description="checkpoint of a head that eagle3 begins with: its weights, vocabulary and taps"
    )
    vocab_size: int = Field(default=8192, ge=2, description="tokens that it can draft, the most frequent ones")
    taps: tuple[int, ...] | None = Field(
        default=None, description="layers of the target whose inputs eagle3 takes; low, middle and high if not given"
    )
    tied_output: bool = Field(default=False, description="keep the target's output projection in eagle3")
    norm_output: bool = Field(default=False, description="feed the normalised hidden state back in eagle3")
    num_heads: int = Field(default=4, ge=1, le=16, description="heads of medusa")
    passes: int = Field(default=5, ge=1, le=16, description="drafts that eagle3 is unrolled over")
    decay: float = Field(default=0.85, gt=0, le=1, description="weight of each draft's loss relative to the one before")
    overlap_weight: float = Field(
        default=0,
        ge=0,
        le=1,
        description="share that the log of the chance of drawn drafts has in the loss of eagle3; the rest is "
        "cross-entropy",
    )
    temperature: float = Field(
        default=0.8, gt=0, le=2, description="temperature of the distributions that are compared"
    )
    row_length: int = Field(default=512, ge=16, le=8192, description="tokens of a packed row; longer texts are cut")
    batch_rows: int = Field(default=64, ge=1, description="packed rows of a step")
    epochs: float = Field(default=4.0, gt=0, description="times that every text is seen")
    learning_rate: float = Field(default=3e-3, gt=0, description="highest learning rate of AdamW")
    weight_decay: float = Field(default=0.01, ge=0, description="of AdamW, for matrices")
    warm_up: float = Field(default=0.03, ge=0, lt=1, description="share of the steps in which the rate rises")
    max_gradient: float = Field(default=1.0, gt=0, description="norm that gradients are clipped to")
    seed: int = Field(default=0, ge=0, description="of initial weights and the order of rows")


def num_steps(settings: TrainSettings, num_rows: int) -> int:
    """Steps of a whole run; the rows of an epoch that fill no batch are left out of it."""
    return max(1, round(settings.epochs * steps_per_epoch(settings, num_rows)))


def steps_per_epoch(settings: TrainSettings, num_rows: int) -> int:
    """At least one."""
    return max(1, num_rows // settings.batch_rows)


def learning_rate(settings: TrainSettings, step: int, total: int) -> float:
    """Of a step from 0 on: up in a straight line, then down along a cosine, to 1% of the highest."""
    rising = max(1, round(settings.warm_up * total))
    if step < rising:
        return settings.learning_rate * (step + 1) / rising
    done = (step - rising) / max(1, total - rising)
    return settings.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def batches(settings: TrainSettings, num_rows: int, first_step: int, total: int) -> Iterator[tuple[int, Tensor]]:
    """Steps from `first_step` on with their rows, [batch_rows] int64; a function of the seed alone."""
    per_epoch = steps_per_epoch(settings, num_rows)
    order, of_epoch = torch.empty(0), -1
    for step in range(first_step, total):
        epoch, index = divmod(step, per_epoch)
        if epoch != of_epoch:
            generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + epoch)
            order, of_epoch = torch.randperm(num_rows, generator=generator), epoch
        yield step, order[index * settings.batch_rows : (index + 1) * settings.batch_rows]
