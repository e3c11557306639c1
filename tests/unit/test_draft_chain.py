"""When a network that drafts token by token stops."""

import pytest
import torch
from torch import Tensor

from proposers.base import Draft, ProposeInput, TargetView
from proposers.draft_chain import DraftChain
from proposers.network import BatchMemory
from server.model.attention import AttentionStep

VOCAB = 4
SHARE = 0.6


class UnsureNetwork:
    """Gives token 1 a share of 0.6 in the first row, and all of it in the second; counts its runs."""

    to_target: Tensor | None = None

    def __init__(self) -> None:
        self.num_runs = 0

    def forward(self, token_ids: Tensor, positions: Tensor, step: AttentionStep, hidden: Tensor | None) -> Tensor:
        self.num_runs += 1
        return torch.zeros(len(token_ids), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        rest = (1 - SHARE) / (VOCAB - 1)
        probabilities = torch.tensor([[rest, SHARE, rest, rest], [0, 1, 0, 0]])
        return probabilities.log().nan_to_num(neginf=-1e9)[: len(hidden)]


def draft(network: UnsureNetwork, least_certainty: float, num_rows: int, device: str = "cpu") -> Draft:
    target = TargetView(device=torch.device(device), vocab_size=VOCAB, num_slots=num_rows)
    chain = DraftChain(network, target, num_drafts=5, is_sampled=False, limit=100, least_certainty=least_certainty)
    slots = torch.arange(num_rows)
    counts = torch.full((num_rows + 1,), 3)
    token_ids = torch.ones(num_rows + 1, 64, dtype=torch.int32)
    memory = BatchMemory(token_ids, torch.ones(num_rows + 1, 4, dtype=torch.int32), counts, counts - 1, 2, 16)
    inputs = ProposeInput(token_ids, slots, counts[:-1], torch.full((num_rows,), 5, dtype=torch.int32), 64)
    return chain.draft(inputs, memory)


@pytest.mark.parametrize(("least", "count"), [(0.0, 5), (0.5, 2), (0.3, 3), (0.65, 1)])
def test_a_row_ends_behind_the_draft_that_makes_it_too_unsure(least: float, count: int) -> None:
    """0.6, 0.36, 0.22: the draft that took it below is proposed, it is there anyway."""
    network = UnsureNetwork()
    drafts = draft(network, least, 1)
    assert drafts.counts.tolist() == [count]
    assert drafts.ids.tolist() == [[1] * count]
    assert network.num_runs == count, "nothing runs for drafts that nobody gets"


def test_sure_rows_go_on() -> None:
    network = UnsureNetwork()
    drafts = draft(network, 0.5, 2)
    assert drafts.counts.tolist() == [2, 5]
    assert drafts.ids.tolist() == [[1, 1, -1, -1, -1], [1] * 5]
    assert network.num_runs == 5


def test_where_steps_are_captured_the_counts_are_the_same() -> None:
    """The host cannot know there, so all passes run."""
    network = UnsureNetwork()
    drafts = draft(network, 0.5, 1, "cuda")
    assert drafts.counts.tolist() == [2]
    assert drafts.ids.tolist() == [[1, 1, -1, -1, -1]]
    assert network.num_runs == 5
