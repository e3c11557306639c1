"""Several proposers in one batch: who drafts for a row, and what the others do meanwhile."""

import torch
from torch import Tensor

from proposers.base import Draft, DraftVocabulary, ProposeInput
from proposers.chain import Arrangement, ProposerChain
from server.plan import RowResult, StepResult
from server.worker.host_drafts import HostDrafting
from tests.fakes.scripted_host_proposer import ScriptedHostProposer
from tests.fakes.worker_state import batch_of, decode_row, flight_on, put_drafts, start

VOCAB = 10


class Fixed:
    """Always the same drafts; implements proposers.base.Proposer."""

    runs_on_device = True

    def __init__(self, drafts: list[list[int]], vocabulary: DraftVocabulary | None, logits: Tensor | None) -> None:
        self.num_speculative_tokens = max(map(len, drafts))
        self.vocabulary = vocabulary
        self.num_calls = 0
        padded = [row + [-1] * (self.num_speculative_tokens - len(row)) for row in drafts]
        self._draft = Draft(
            torch.tensor(padded, dtype=torch.int32),
            torch.tensor([len(row) for row in drafts], dtype=torch.int32),
            logits,
        )

    def propose(self, inputs: ProposeInput) -> Draft:
        self.num_calls += 1
        return self._draft


def certain(*drafts: list[int]) -> Fixed:
    return Fixed(list(drafts), None, None)


def inputs(device: str = "cpu") -> ProposeInput:
    rows = torch.zeros(3, dtype=torch.int64, device=device)
    return ProposeInput(rows[:, None].int(), rows, rows + 1, rows.int() + 9, max_num_tokens=1)


def test_each_row_takes_the_first_draft_there_is() -> None:
    members = certain([5], [], []), certain([1, 2], [3], []), certain([4], [4], [4, 4, 4])
    chain = ProposerChain(list(enumerate(members)), VOCAB)
    draft = chain.propose(inputs())
    assert draft.ids.tolist() == [[5, -1, -1], [3, -1, -1], [4, 4, 4]]
    assert draft.counts.tolist() == [1, 1, 3]
    assert draft.ranks is not None
    assert draft.ranks.tolist() == [0, 1, 2]
    assert (draft.logits, chain.vocabulary, chain.num_speculative_tokens) == (None, None, 3)
    assert [member.num_calls for member in members] == [1, 1, 1]


def test_distributions_are_those_of_whoever_drafted() -> None:
    """A reduced vocabulary becomes the target's; what is certain is a distribution too."""
    to_draft = torch.full((VOCAB,), -1, dtype=torch.int32)
    to_draft[6], to_draft[2] = 0, 1
    logits = torch.tensor([[[0.0, 1.0]]]).expand(3, 1, 2)
    drawing = Fixed([[6], [2], [2]], DraftVocabulary(2, torch.float32, to_draft), logits)
    chain = ProposerChain([(0, certain([1, 3], [], [])), (2, drawing)], VOCAB)
    draft = chain.propose(inputs())
    assert draft.logits is not None
    assert chain.vocabulary == DraftVocabulary(VOCAB, torch.float32)
    q = draft.logits.softmax(-1)
    assert q[0, 0, 1] == q[0, 1, 3] == 1
    assert q[1, 0].nonzero()[:, 0].tolist() == [2, 6]
    torch.testing.assert_close(q[1, 0, [6, 2]], logits[0, 0].softmax(-1))


def test_proposers_are_arranged_by_where_they_run() -> None:
    device, host = certain([1], [1], [1]), ScriptedHostProposer(5, [[1]])
    alone = Arrangement.of([device], VOCAB)
    assert (alone.on_device, alone.on_host, alone.num_speculative_tokens) == (device, (), 1)
    both = Arrangement.of([host, device], VOCAB)
    assert (both.on_host, both.num_speculative_tokens) == (((0, host),), 5)
    assert isinstance(both.on_device, ProposerChain)
    nobody = Arrangement.of([], VOCAB)
    assert (nobody.on_device, nobody.on_host, nobody.num_speculative_tokens) == (None, (), 0)


def test_drafts_from_the_host_go_behind_those_of_whoever_ranks_before(device_name: str) -> None:
    """Slot 0 has none on the device, slot 1 some of rank 0, slot 2 some of rank 3; those of the host have rank 1."""
    starts = [start(slot, [slot + 1, 7], num_speculative_tokens=2) for slot in range(3)]
    batch = batch_of(starts, device_name, max_drafts=2)
    host = ScriptedHostProposer(2, [[slot + 1, 7, 8, 9, 9] for slot in range(3)])
    drafting = HostDrafting([(1, host)], batch, VOCAB, are_alone=False)
    for each in starts:
        drafting.start(each)
    put_drafts(batch, 1, [5])
    put_drafts(batch, 2, [6])
    batch.draft_rank[2] = 3
    rows = [decode_row(slot, 2, 0) for slot in range(3)]
    settled = StepResult(tuple(RowResult(slot, 0, (8,), num_next_drafts=(0, 1, 1)[slot]) for slot in range(3)))
    assert [row.num_next_drafts for row in drafting.advance(rows, settled, proposes=True).rows] == [2, 2, 2]
    flight = flight_on(device_name)
    staged = drafting.stage(rows, flight)
    assert staged is not None
    flight.send()
    drafting.apply(staged)
    assert batch.num_drafts[:3].tolist() == [2, 1, 2]
    assert batch.token_ids[:3, 2:4].tolist() == [[9, 9], [5, 0], [9, 9]]
    assert drafting.stage(rows, flight) is None


def test_of_several_on_the_host_the_first_with_drafts_is_taken_and_all_learn() -> None:
    starts = [start(slot, [slot + 1, 7], num_speculative_tokens=2) for slot in range(2)]
    batch = batch_of(starts, "cpu", max_drafts=2)
    first, second = ScriptedHostProposer(2, [[1, 0], [2, 7, 8, 9]]), ScriptedHostProposer(2, [[1, 7, 8, 5], [2, 0]])
    drafting = HostDrafting([(0, first), (1, second)], batch, VOCAB, are_alone=True)
    for each in starts:
        drafting.start(each)
    rows = [decode_row(slot, 2, 0) for slot in range(2)]
    settled = StepResult(tuple(RowResult(slot, 0, (8,)) for slot in range(2)))
    assert [row.num_next_drafts for row in drafting.advance(rows, settled, proposes=True).rows] == [1, 1]
    flight = flight_on("cpu")
    staged = drafting.stage(rows, flight)
    assert staged is not None
    assert (staged.ranks.tolist(), staged.ids[:, 0].tolist()) == ([1, 0], [5, 9])
    flight.send()
    drafting.apply(staged)
    assert batch.num_drafts[:2].tolist() == [1, 1]
    assert batch.token_ids[:2, 2:4].tolist() == [[5, 0], [9, 0]]
    assert first.propose(1, 2) == [9]
    assert second.propose(0, 2) == [5]
