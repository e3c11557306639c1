"""Penalties: the kernel against its eager twin, through the interpreter where there is no GPU."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from server.kernels import reference
from server.kernels.penalties import BLOCK_T, penalise

VOCAB = 40


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in shuffled slots, with leftovers of earlier sequences behind them."""

    token_ids: Tensor
    slots: Tensor
    num_tokens: Tensor
    num_prompt: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    @classmethod
    def random(cls, lengths: list[tuple[int, int]], num_positions: int, device: str) -> "Rows":
        """Args: lengths: of each row's prompt and of its output."""
        generator = torch.Generator().manual_seed(len(lengths) + num_positions)
        num_slots = len(lengths) + 2
        slots = torch.randperm(num_slots, generator=generator)[: len(lengths)]
        width = max(sum(row) for row in lengths) + num_positions
        num_prompt, num_tokens = torch.zeros(2, num_slots, dtype=torch.int64)
        num_prompt[slots] = torch.tensor([prompt for prompt, _ in lengths])
        num_tokens[slots] = torch.tensor([sum(row) for row in lengths])
        penalties = torch.rand(3, num_slots, generator=generator) * torch.tensor([[1.5], [2.0], [2.0]]) + 0.1
        penalties[1:] -= 1
        # Half of the vocabulary: the other half has not been seen.
        token_ids = torch.randint(VOCAB // 2, (num_slots, width), generator=generator, dtype=torch.int32)
        tensors = (token_ids, slots, num_tokens, num_prompt, *penalties)
        return cls(*(x.to(device) for x in tensors))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In the order of the kernel's arguments."""
        columns = (self.num_tokens, self.num_prompt, self.repetition, self.frequency, self.presence)
        return (self.token_ids, self.slots, *columns)


def logits_of(num_rows: int, num_positions: int, device: str) -> Tensor:
    """Logits of both signs and zeros, with strides of their own."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(num_positions, num_rows, VOCAB, generator=generator).to(device)
    logits[:, :, ::7] = -torch.inf
    logits[:, :, 1::7] = 0.0
    return logits.transpose(0, 1)


def scratch(num_rows: int, device: str) -> Tensor:
    """More rows than are needed, as a captured batch has."""
    return torch.zeros(num_rows + 1, VOCAB, dtype=torch.int32, device=device)


LENGTHS = [(1, 0), (5, 9), (3, 0), (1, 40), (17, BLOCK_T), (2 * BLOCK_T, 3), (700, 800)]


@pytest.mark.parametrize("num_positions", [1, 2, 6])
def test_bits_equal_the_twin_s_and_the_scratch_is_left_clean(kernel_device: str, num_positions: int) -> None:
    rows = Rows.random(LENGTHS, num_positions, kernel_device)
    logits = logits_of(len(LENGTHS), num_positions, kernel_device)
    expected = logits.clone()
    reference.penalise(expected, *rows.tensors())
    assert not torch.equal(expected, logits)
    counts = scratch(len(LENGTHS), kernel_device)
    penalise(logits, *rows.tensors(), counts)
    assert torch.equal(logits, expected)
    assert not counts.any()


def test_each_position_sees_the_drafts_in_front_of_it(kernel_device: str) -> None:
    rows = Rows.random([(2, 2)], 4, kernel_device)
    slot = int(rows.slots[0])
    rows.token_ids[slot, :7] = torch.tensor([1, 2, 2, 3, 9, 3, 9], device=kernel_device)
    for column, value in ((rows.repetition, 2.0), (rows.frequency, 0.25), (rows.presence, 0.5)):
        column[slot] = value
    logits = torch.full((1, 4, VOCAB), 4.0, device=kernel_device)
    penalise(logits, *rows.tensors(), scratch(1, kernel_device))
    assert logits[0, :, 1].tolist() == [2.0] * 4, "of the prompt alone"
    assert logits[0, :, 2].tolist() == [1.25] * 4
    assert logits[0, :, 3].tolist() == [1.25, 1.25, 1.0, 1.0]
    assert logits[0, :, 9].tolist() == [4.0, 1.25, 1.25, 1.0]
    assert logits[0, :, 5].tolist() == [4.0] * 4


def test_rows_without_penalties_or_tokens_are_left_alone(kernel_device: str) -> None:
    """Padding of a captured batch has no tokens; all its rows may share one slot."""
    rows = Rows.random([(5, 5)] * 4, 3, kernel_device)
    neutral, padding = rows.slots[[0, 1]], rows.slots[2]
    for column, value in ((rows.repetition, 1.0), (rows.frequency, 0.0), (rows.presence, 0.0)):
        column[neutral] = value
    rows.num_tokens[padding] = rows.num_prompt[padding] = 0
    rows.slots[3] = padding
    rows.repetition[padding] = 0  # as in a slot that was never used
    logits = logits_of(4, 3, kernel_device)
    before, counts = logits.clone(), scratch(4, kernel_device)
    penalise(logits, *rows.tensors(), counts)
    assert torch.equal(logits, before)
    assert not counts.any()


def test_no_rows(kernel_device: str) -> None:
    rows = Rows.random([(5, 5)], 2, kernel_device)
    args = (logits_of(1, 2, kernel_device), *rows.tensors(), scratch(1, kernel_device))
    penalise(args[0][:0], args[1], args[2][:0], *args[3:])


def test_what_does_not_fit_is_refused(kernel_device: str) -> None:
    rows = Rows.random([(5, 5)] * 2, 2, kernel_device)
    logits, counts = logits_of(2, 2, kernel_device), scratch(2, kernel_device)
    with pytest.raises(ValueError, match="2 rows need"):
        penalise(logits, *replace(rows, slots=rows.slots[:1]).tensors(), counts)
    with pytest.raises(ValueError, match="int64"):
        penalise(logits, *replace(rows, slots=rows.slots.int()).tensors(), counts)
    with pytest.raises(ValueError, match="float32"):
        penalise(logits.half(), *rows.tensors(), counts)
    with pytest.raises(ValueError, match="no scratch"):
        penalise(logits, *rows.tensors(), counts[:1])
    with pytest.raises(ValueError, match="not contiguous"):
        penalise(logits.mT.contiguous().mT, *rows.tensors(), counts)
