"""What is minimised: how far the drafts' distributions are from the target's own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from proposers.base import Head, TargetModel
from proposers.training.distances import distance
from proposers.training.eagle_trainee import EagleTrainee
from proposers.training.medusa_trainee import MedusaTrainee
from proposers.training.packing import PackedRows
from proposers.training.target import Features


@dataclass(frozen=True, slots=True)
class Judged:
    """How well the drafts of each depth fit; [depths] each, means over the places they were made for.

    Attributes:
        loss: distance to the target's distribution in nats.
        agreement: share whose likeliest token is the target's likeliest of those the head knows.
        overlap: probability that a draft drawn at the temperature is kept. Both are None unless asked for.
    """

    loss: Tensor
    agreement: Tensor | None
    overlap: Tensor | None


class Objective(Protocol):
    """Judges one kind of head on packed rows."""

    @property
    def trainee(self) -> torch.nn.Module:
        """What is trained."""

    def judge(self, rows: PackedRows, features: Features, *, is_detailed: bool) -> Judged:
        """Run the head over some rows."""


class _Teacher:
    """The target's distribution over a reduced vocabulary, tokens outside it left out but not made up for.

    So a place counts as much as its drafts can be right.
    """

    def __init__(self, target: TargetModel, to_target: Tensor, temperature: float) -> None:
        self._head: Head = target.head.rows(to_target)
        self._temperature = temperature

    @torch.no_grad()
    def probabilities(self, features: Features, places: Tensor) -> Tensor:
        """[n, vocab] float32 of some places, [n] int64 in the flattened rows."""
        with torch.autocast(places.device.type, enabled=False):  # the target's own precision
            logits = self._head.logits(features.last.flatten(0, 1)[places])
        return (logits / self._temperature - features.normaliser.flatten()[places, None]).exp()


_Distance = Callable[[Tensor, Tensor], Tensor]
"""Logits and probabilities, [n, vocab] each -> [n]."""


class _Depths:
    """Gathers what is known of each depth."""

    def __init__(self, temperature: float, distance: _Distance, *, is_detailed: bool) -> None:
        self._temperature = temperature
        self._distance = distance
        self._is_detailed = is_detailed
        self._losses: list[Tensor] = []
        self._agreements: list[Tensor] = []
        self._overlaps: list[Tensor] = []

    def add(self, logits: Tensor, probabilities: Tensor, is_made: Tensor) -> None:
        """[n, vocab] each, of the next depth; is_made: [n] bool, places that have such a draft."""
        weight = is_made.float() / is_made.sum().clamp(min=1)
        self._losses.append((self._distance(logits, probabilities) * weight).sum())
        if self._is_detailed:
            with torch.no_grad():
                scaled = logits.float() / self._temperature
                self._agreements.append(((scaled.argmax(-1) == probabilities.argmax(-1)) * weight).sum())
                self._overlaps.append((torch.minimum(scaled.softmax(-1), probabilities).sum(-1) * weight).sum())

    def judged(self) -> Judged:
        """All depths."""
        detail = [torch.stack(each) if each else None for each in (self._agreements, self._overlaps)]
        return Judged(torch.stack(self._losses), *detail)


class EagleObjective:
    """An EAGLE-3 head unrolled over its own drafts."""

    def __init__(
        self,
        trainee: EagleTrainee,
        target: TargetModel,
        *,
        num_passes: int,
        temperature: float,
        overlap_weight: float = 0,
        compiles: bool = False,
    ) -> None:
        """Args:
        overlap_weight: see `distance`.
        compiles: whether the unrolled head and its loss are compiled, which takes a minute and makes steps shorter.
        """
        self.trainee = trainee
        compared = torch.compile(distance) if compiles else distance
        self._distance = partial(compared, temperature=temperature, overlap_weight=overlap_weight)
        self._unroll = torch.compile(trainee.unroll) if compiles else trainee.unroll
        self._teacher = _Teacher(target, trainee.to_target, temperature)
        self._num_passes = num_passes
        self._temperature = temperature

    def judge(self, rows: PackedRows, features: Features, *, is_detailed: bool) -> Judged:
        """Pass by pass."""
        places = rows.is_output.flatten().nonzero()[:, 0]
        probabilities = self._teacher.probabilities(features, places)
        positions = rows.positions.flatten()[places]
        depths = _Depths(self._temperature, self._distance, is_detailed=is_detailed)
        for index, made in enumerate(self._unroll(rows, features, self._num_passes)):
            logits = self.trainee.logits(made.flatten(0, 1)[places])
            depths.add(logits, probabilities, positions >= 1 + index)
        return depths.judged()


class MedusaObjective:
    """Medusa heads, each by itself: head j foretells the token that is 2 + j places behind its hidden state."""

    def __init__(self, trainee: MedusaTrainee, target: TargetModel, *, temperature: float) -> None:
        self.trainee = trainee
        self._teacher = _Teacher(target, trainee.to_target, temperature)
        self._distance = partial(distance, temperature=temperature, overlap_weight=0)
        self._temperature = temperature

    def judge(self, rows: PackedRows, features: Features, *, is_detailed: bool) -> Judged:
        """Head by head."""
        places = rows.is_output.flatten().nonzero()[:, 0]
        probabilities = self._teacher.probabilities(features, places)
        last = features.last.flatten(0, 1)[places]
        # Outputs have no gaps, and a text's last place is none of the chosen: what is d further on, and d behind it
        # among the chosen, is of the same text.
        depths = _Depths(self._temperature, self._distance, is_detailed=is_detailed)
        for ahead, state in enumerate(self.trainee.states(last), 1):
            is_there = places[ahead:] - places[:-ahead] == ahead
            depths.add(self.trainee.logits(state[:-ahead]), probabilities[ahead:], is_there)
        return depths.judged()
