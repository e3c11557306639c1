"""Texts laid side by side in rows of one length, so that a batch is full and always has the same shape."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proposers.training.texts import Text
from server.errors import ConfigError

PADDING = -1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a text lies: `text` is its index, its first token at `column` of `row`."""

    text: int
    row: int
    column: int


@dataclass(frozen=True, slots=True)
class PackedRows:
    """R rows of L places, in order of their texts' places.

    Attributes:
        token_ids: [R, L] int64, 0 for padding.
        documents: [R, L] int64, which text of its row a place belongs to; PADDING behind the last.
        positions: [R, L] int64, in the text; 0 for padding.
        is_output: [R, L] bool, whether the token behind a place was generated, so that it is to be foretold.
    """

    token_ids: Tensor
    documents: Tensor
    positions: Tensor
    is_output: Tensor

    @property
    def num_rows(self) -> int:
        """R."""
        return self.token_ids.shape[0]

    @property
    def row_length(self) -> int:
        """L."""
        return self.token_ids.shape[1]

    def take(self, rows: Tensor) -> "PackedRows":
        """Some of the rows, [n] int64."""
        return PackedRows(self.token_ids[rows], self.documents[rows], self.positions[rows], self.is_output[rows])

    def followed_by(self, others: "PackedRows") -> "PackedRows":
        """These rows and others of the same length."""
        return PackedRows(
            torch.cat((self.token_ids, others.token_ids)),
            torch.cat((self.documents, others.documents)),
            torch.cat((self.positions, others.positions)),
            torch.cat((self.is_output, others.is_output)),
        )

    def to(self, device: torch.device) -> "PackedRows":
        """The same on a device."""
        return PackedRows(
            self.token_ids.to(device),
            self.documents.to(device),
            self.positions.to(device),
            self.is_output.to(device),
        )


def pack(texts: Sequence[Text], row_length: int) -> tuple[PackedRows, list[Place]]:
    """Lay out texts, the longest first, each in the fullest row that has room; longer ones are cut at the end.

    Raises: ConfigError if a prompt alone fills a row.
    """
    order = sorted(range(len(texts)), key=lambda index: (-len(texts[index].token_ids), index))
    rows_by_room: list[list[int]] = [[] for _ in range(row_length + 1)]
    used: list[int] = []
    places: list[Place] = []
    for index in order:
        text = texts[index]
        if text.num_prompt >= row_length:
            raise ConfigError(f"a prompt of {text.num_prompt} tokens does not fit into rows of {row_length}")
        length = min(len(text.token_ids), row_length)
        room = next((room for room in range(length, row_length + 1) if rows_by_room[room]), None)
        if room is None:
            row, room = len(used), row_length
            used.append(0)
        else:
            row = rows_by_room[room].pop()
        places.append(Place(index, row, used[row]))
        used[row] += length
        rows_by_room[room - length].append(row)
    return _fill(texts, places, len(used), row_length), places


def _fill(texts: Sequence[Text], places: Sequence[Place], num_rows: int, row_length: int) -> PackedRows:
    shape = (num_rows, row_length)
    token_ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    documents, is_output = np.full(shape, PADDING, np.int64), np.zeros(shape, np.bool_)
    num_documents = [0] * num_rows
    for place in places:
        text = texts[place.text]
        kept = text.token_ids[:row_length]
        here = slice(place.column, place.column + len(kept))
        token_ids[place.row, here] = kept
        positions[place.row, here] = np.arange(len(kept))
        documents[place.row, here] = num_documents[place.row]
        is_output[place.row, place.column + text.num_prompt - 1 : place.column + len(kept) - 1] = True
        num_documents[place.row] += 1
    return PackedRows(*map(torch.from_numpy, (token_ids, documents, positions, is_output)))
