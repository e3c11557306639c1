"""What host proposers are told of, in which order, and what becomes of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from proposers.base import HostProposer, SequenceText
from server.plan import PlanRow, RowResult, SequenceStart, StepResult
from server.request import Request, SamplingParams
from server.worker.batch import BatchState
from server.worker.host_drafts import HostDrafting, RankedDraft

K = 3
VOCAB = 100


class Recorder(HostProposer):
    """Notes its calls, and drafts what it is given.

    Args: drafts: by slot; a slot without any raises.
    """

    def __init__(self, drafts: dict[int, Sequence[int]]) -> None:
        self._drafts = drafts
        self.calls: list[tuple[str, int]] = []

    @property
    def num_speculative_tokens(self) -> int:
        return K

    def start(self, slot: int, text: SequenceText) -> None:
        self.calls.append(("start", slot))

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self.calls.append(("extend", slot))

    def propose(self, slot: int, max_drafts: int) -> Sequence[int]:
        self.calls.append(("propose", slot))
        return self._drafts[slot]


def drafting(*members: Recorder, max_drafts: Sequence[int] = (K, K, K)) -> HostDrafting:
    """With a sequence in each slot, and no call noted."""
    batch = BatchState(len(max_drafts), 64, 16, K, torch.device("cpu"))
    made = HostDrafting(list(enumerate(members)), batch, VOCAB, are_alone=True)
    for slot, most in enumerate(max_drafts):
        request = Request(request_id=str(slot), prompt_token_ids=(1,), sampling=SamplingParams())
        made.start(SequenceStart(slot, request, 0, (1,), 1, 0, (), most))
    for member in members:
        member.calls.clear()
    return made


def advance(made: HostDrafting, tokens: Sequence[tuple[int, ...]], *, proposes: bool) -> StepResult:
    """A step with so many tokens for each slot."""
    rows = [PlanRow(slot, slot, 0, 1, 0, 2, is_sampling=True) for slot in range(len(tokens))]
    results = tuple(RowResult(slot, 0, token_ids) for slot, token_ids in enumerate(tokens))
    return made.advance(rows, StepResult(results, draft_s=1.0), proposes=proposes)


def test_a_whole_step_is_told_of_before_the_first_drafts() -> None:
    member = Recorder({0: [5], 1: [5], 2: [5]})
    result = advance(drafting(member), [(7,), (), (8, 9)], proposes=True)
    assert member.calls == [("extend", 0), ("extend", 2), ("propose", 0), ("propose", 2)]
    assert [row.num_next_drafts for row in result.rows] == [1, 0, 1]
    assert result.draft_s > 1.0


def test_who_has_no_drafts_is_not_told_of() -> None:
    member = Recorder({1: [5]})
    advance(drafting(member, max_drafts=(0, 1)), [(7,), (8,)], proposes=True)
    assert member.calls == [("extend", 1), ("propose", 1)]


def test_while_drafts_are_off_tokens_are_passed_on_and_nothing_else() -> None:
    member = Recorder({0: [5], 1: [5]})
    made = drafting(member)
    advance(made, [(7,), (8,)], proposes=True)
    assert set(made.pending) == {0, 1}
    member.calls.clear()
    result = advance(made, [(7,), ()], proposes=False)
    assert member.calls == [("extend", 0)]
    assert set(made.pending) == {1}, "drafts behind a token that is not the last one any more are of no use"
    assert [row.num_next_drafts for row in result.rows] == [0, 0]
    assert result.draft_s == 1.0


def test_nobody_is_asked_after_the_first_with_drafts() -> None:
    first, second = Recorder({0: [], 1: [5, 6]}), Recorder({0: [7], 1: [8]})
    made = drafting(first, second)
    advance(made, [(1,), (1,)], proposes=True)
    assert made.pending == {0: RankedDraft([7], 1), 1: RankedDraft([5, 6], 0)}
    assert second.calls == [("extend", 0), ("extend", 1), ("propose", 0)]


@pytest.mark.parametrize("drafts", [[5, 6, VOCAB], [5, 6, -1, 7], [5, 6, 1 << 40, 8, 9]])
def test_what_is_no_token_is_cut_off(drafts: list[int]) -> None:
    made = drafting(Recorder({0: drafts}))
    advance(made, [(1,)], proposes=True)
    assert made.pending[0].token_ids == [5, 6]


def test_whatever_counts_as_an_integer_is_a_draft() -> None:
    made = drafting(Recorder({0: np.array([5, 6, 7, 8])}))  # type: ignore[dict-item]  # as somebody will
    advance(made, [(1,)], proposes=True)
    assert made.pending == {0: RankedDraft([5, 6, 7], 0)}


@pytest.mark.parametrize("drafts", [[5, 6.5], np.array([0.5]), ["a"], None])
def test_what_is_no_integer_is_a_failure_of_its_proposer_alone(drafts: Any) -> None:
    made = drafting(Recorder({0: drafts, 1: drafts}), Recorder({0: [7], 1: [8]}))
    advance(made, [(1,), (1,)], proposes=True)
    assert made.pending == {0: RankedDraft([7], 1), 1: RankedDraft([8], 1)}


def test_who_fails_drafts_no_more_for_that_sequence(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Recorder({1: [5]}), Recorder({0: [7]})
    made = drafting(first, second)
    for _ in range(2):
        advance(made, [(1,), (1,)], proposes=True)
    assert made.pending == {0: RankedDraft([7], 1), 1: RankedDraft([5], 0)}
    assert [call for call in first.calls if call[1] == 0] == [("extend", 0), ("propose", 0)]
    assert len(caplog.records) == 1
