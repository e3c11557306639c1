"""A network without numbers: what it keeps for a token says which text it stands for, and whether it may be trusted."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from proposers.network import Features, KVShape
from server.kv.block_pool import NULL_BLOCK
from server.model.attention import AttentionStep
from tests.fakes.executor import VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class Cell:
    """What is kept for a token: the state of the text up to it, if all that it was made of belongs to that text."""

    state: int
    is_right: bool


class RecordingNetwork:
    """Implements proposers.network.DraftNetwork.

    Attributes:
        cells: by block and offset.
    """

    fingerprint = "0" * 64
    to_target: Tensor | None = None
    kv_shape = KVShape(1, 1, 1, torch.float64)

    def __init__(
        self, states_of: Callable[[int], list[int]], block_size: int, *, is_fed: bool, max_num_tokens: int | None
    ) -> None:
        """Args: states_of: of the text in a slot, the state after each token."""
        self._states_of = states_of
        self._block_size = block_size
        self._is_fed = is_fed
        self.features: Features = "last" if is_fed else None
        self.max_num_tokens = max_num_tokens
        self.cells: dict[tuple[int, int], Cell] = {}

    def bind_kv(self, kv: Tensor) -> None:
        """Nothing is kept in tensors."""

    def condense(self, features: Tensor) -> Tensor:
        """[T, 1], the state of the text up to each token, as float64."""
        return features

    def forward(self, token_ids: Tensor, positions: Tensor, step: AttentionStep, hidden: Tensor | None) -> Tensor:
        """Keep a cell for each real token. Returns: [T, 1] zeros, which are the state of no text."""
        blocks, places = step.write_blocks.tolist(), positions.tolist()
        fed = [None] * len(places) if hidden is None else hidden[:, 0].long().tolist()
        for first, count, slot in zip(
            step.first_token.tolist(), step.num_query.tolist(), step.slots.tolist(), strict=True
        ):
            states, table = self._states_of(slot), step.block_table[slot].tolist()
            begin = 0 if step.starts is None else int(step.starts[slot])
            for index in range(first, first + count):
                if blocks[index] == NULL_BLOCK:
                    continue
                position = places[index]
                is_right = position < len(states) and all(
                    self.holds(table, at, states[at]) for at in range(begin, position)
                )
                if self._is_fed:
                    is_right = is_right and position > 0 and fed[index] == states[position - 1]
                state = states[position] if position < len(states) else 0
                self.cells[blocks[index], position % self._block_size] = Cell(state, is_right)
        return torch.zeros(len(places), 1, dtype=torch.float64)

    def logits(self, hidden: Tensor) -> Tensor:
        """All tokens are alike."""
        return torch.zeros(len(hidden), VOCAB_SIZE)

    def holds(self, table: list[int], position: int, state: int) -> bool:
        """Whether what is kept for a position is right for the text with this state up to it."""
        cell = self.cells.get((table[position // self._block_size], position % self._block_size))
        return cell is not None and cell.is_right and cell.state == state
