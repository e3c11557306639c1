"""Acceptance over texts that were generated before."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from proposers.training.acceptance import Chances, Drafter, walk
from proposers.training.measures import ALL_KINDS, Line, Measures
from proposers.training.packing import Place, pack
from proposers.training.repetition import MOST_REPEATED, repeated_share
from proposers.training.target import TargetFeatures
from proposers.training.texts import Text

HOW = "teacher-forced"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What a head is measured on.

    Attributes:
        texts: none of them trained on. ks: numbers of drafts. seed: of the coins that drawn drafts are kept by.
        row_length, batch_rows: of the packed rows that are looked at together.
    """

    texts: Sequence[Text]
    ks: Sequence[int]
    row_length: int = 512
    batch_rows: int = 16
    seed: int = 0


def measure(held_out: HeldOut, drafter: Drafter, target: TargetFeatures, device: torch.device, method: str) -> Measures:
    """Walk through every text with every number of drafts. Args: method: the name of the lines."""
    ks = [k for k in held_out.ks if drafter.most_drafts is None or k <= drafter.most_drafts]
    rows, places = pack(held_out.texts, held_out.row_length)
    by_row: dict[int, list[Place]] = {}
    for place in places:
        by_row.setdefault(place.row, []).append(place)
    measures, coins = Measures(), np.random.default_rng(held_out.seed)
    for indices in torch.arange(rows.num_rows).split(held_out.batch_rows):
        taken = rows.take(indices).to(device)
        chances = drafter.chances(taken, target.compute(taken), max(ks))
        for index, row in enumerate(indices.tolist()):
            for place in by_row[row]:
                _count(measures, held_out.texts[place.text], place, chances, index, ks, coins, method)
    return measures


def _count(
    measures: Measures,
    text: Text,
    place: Place,
    chances: Chances,
    row: int,
    ks: Sequence[int],
    coins: np.random.Generator,
    method: str,
) -> None:
    here = slice(place.column, min(place.column + len(text.token_ids), chances.kept.shape[2]))
    by_drafts: dict[str, npt.NDArray[np.bool_]] = {"greedy": chances.is_likeliest[:, row, here]}
    if text.temperature > 0:
        kept = chances.kept[:, row, here]
        by_drafts["drawn"] = coins.random(kept.shape, dtype=np.float32) < kept
    is_varied = repeated_share(text.output_ids.tolist()) <= MOST_REPEATED
    for drafts, is_kept in by_drafts.items():
        for kind in (text.kind, ALL_KINDS):
            for is_low_repetition in (False, True) if is_varied else (False,):
                for k in ks:
                    line = Line(HOW, method, text.split, kind, text.temperature, drafts, is_low_repetition, k)
                    tally = measures.of(line)
                    tally.num_texts += 1
                    walk(is_kept, text.num_prompt + 1, tally)
