"""What a change of the policy does between two steps."""

from dataclasses import dataclass, field

import pytest

from server.kv.prefix_cache import BlockHashes
from server.request import Request, SamplingParams
from server.scheduler.auto_policy import AutoPolicy
from server.scheduler.draft_control import DraftControl
from server.scheduler.draft_policy import Allowance, FixedPolicy
from server.scheduler.on_off_policy import OnOffPolicy
from server.scheduler.policy_choice import make_policy
from server.scheduler.sequence import Sequence
from server.speculative_config import PolicyConfig


@dataclass
class Watched(FixedPolicy):
    """Notes what it is told."""

    max_drafts: int
    told: list[tuple[int, int]] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.max_drafts)

    def settle_row(self, allowance: Allowance, allowed: int, num_accepted: int) -> None:
        self.told.append((allowed, num_accepted))

    def settle_step(self, allowance: Allowance, num_rows: int, duration_s: float) -> None:
        self.durations_s.append(duration_s)


@pytest.fixture
def sequence() -> Sequence:
    request = Request(request_id="0", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=9))
    hashes = BlockHashes(b"", 16)
    return Sequence(
        seq_id=0, request=request, choice=0, order=(0, 0), hashes=hashes, num_speculative_tokens=5, key=0, token_ids=[1]
    )


def launch(control: DraftControl, sequence: Sequence, now_s: float) -> tuple[int, int]:
    """Most drafts of a row, and how many are proposed for the step after."""
    control.begin(1)
    allowed = control.allow(sequence)
    return allowed, control.launch(now_s, 1, is_decoding=True, is_speculating=True)


def test_nothing_is_proposed_or_verified_while_off(sequence: Sequence) -> None:
    control = DraftControl(FixedPolicy(5))
    assert [launch(control, sequence, now_s) for now_s in (0.0, 1.0)] == [(0, 5), (5, 5)]
    control.is_on = False
    assert [launch(control, sequence, now_s) for now_s in (2.0, 3.0)] == [(0, 0), (0, 0)]
    control.is_on = True
    assert [launch(control, sequence, now_s) for now_s in (4.0, 5.0)] == [(0, 5), (5, 5)]


def test_steps_under_way_settle_with_their_own_policy(sequence: Sequence) -> None:
    before, after = Watched(5), Watched(2)
    control = DraftControl(before)
    launch(control, sequence, 0.0)
    launch(control, sequence, 1.0)
    control.use(after)
    assert launch(control, sequence, 2.0) == (2, 2)
    for now_s, allowed in ((2.0, 0), (3.0, 5), (5.0, 2)):
        control.settle_row(allowed, 1)
        control.settle_step(now_s, is_usual=True)
    assert (before.told, before.durations_s) == ([(5, 1)], [2.0, 1.0])
    assert (after.told, after.durations_s) == ([(2, 1)], [2.0])


@pytest.mark.parametrize(("is_steady", "durations_s"), [(True, [1.0]), (False, [1.0, 4.0])])
def test_work_for_other_steps_counts_where_a_probe_causes_it(
    sequence: Sequence, is_steady: bool, durations_s: list[float]
) -> None:
    class Changing(Watched):
        def allow(self, num_rows: int, num_new: int = 0) -> Allowance:
            return Allowance(5, 5, is_steady=is_steady)

    policy = Changing(5)
    control = DraftControl(policy)
    for launched_s, settled_s, is_usual in ((0.0, 1.0, True), (1.0, 5.0, False)):
        launch(control, sequence, launched_s)
        control.settle_step(settled_s, is_usual=is_usual)
    assert policy.durations_s == durations_s


def test_a_policy_is_asked_once_for_each_step(sequence: Sequence) -> None:
    """Where drafts come from the host, every other plan has no rows: all wait for the step before."""

    class Alternating(FixedPolicy):
        def allow(self, num_rows: int, num_new: int = 0) -> Allowance:
            self.num_asked = getattr(self, "num_asked", 0) + 1
            return Allowance(5, 5 * (self.num_asked % 2))

    control = DraftControl(Alternating(5))
    allowed = []
    for now_s in range(4):
        control.begin(1)
        allowed.append(launch(control, sequence, float(now_s)))
    assert allowed == [(0, 5), (5, 0), (0, 5), (5, 0)]
    control.begin(1)
    control.use(FixedPolicy(3))
    assert launch(control, sequence, 4.0) == (0, 3)


def test_a_policy_is_asked_again_where_all_rows_will_be_new(sequence: Sequence) -> None:
    """The last row has ended since a plan came to nothing."""

    class Restarting(FixedPolicy):
        def allow(self, num_rows: int, num_new: int = 0) -> Allowance:
            return Allowance(0, 0 if num_rows else 5)

    control = DraftControl(Restarting(5))
    assert launch(control, sequence, 0.0) == (0, 0)
    control.begin(1)
    control.begin(0)
    assert control.launch(1.0, 1, is_decoding=False, is_speculating=False) == 5


def test_a_smaller_number_is_taken_of_what_was_proposed_for_a_larger_one(sequence: Sequence) -> None:
    control = DraftControl(FixedPolicy(5))
    launch(control, sequence, 0.0)
    control.use(FixedPolicy(2))
    assert launch(control, sequence, 1.0) == (2, 2)
    control.use(FixedPolicy(4))
    assert [launch(control, sequence, now_s)[0] for now_s in (2.0, 3.0)] == [2, 4]


def test_policies_by_their_settings() -> None:
    assert isinstance(make_policy(PolicyConfig(), 5), AutoPolicy)
    assert isinstance(make_policy(PolicyConfig(), 5, is_captured=True), OnOffPolicy)
    assert make_policy(PolicyConfig(policy="fixed"), 5).allow(1) == Allowance(5, 5)
    schedule = make_policy(PolicyConfig(num_speculative_tokens_per_batch_size={1: 8, 4: 0}), 5)
    assert [schedule.allow(num_rows) for num_rows in (0, 1, 4)] == [Allowance(5, 5), Allowance(5, 5), Allowance(0, 0)]
    assert schedule.allow(0, 4) == Allowance(0, 0)
