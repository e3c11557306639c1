"""A change reaches the proposers and the scheduler, or nobody."""

import logging
from dataclasses import dataclass, field

import pytest

from proposers.suffix import SuffixConfig
from server.engine.speculation_control import SpeculationControl
from server.errors import InvalidRequest
from server.scheduler.draft_control import DraftControl
from server.scheduler.draft_policy import FixedPolicy
from server.speculation_state import ProposerChange, SpeculationChange
from tests.fakes.speculative import speculative_config


@dataclass
class Told:
    """A proposer that notes its parameter."""

    fails: bool = False
    values: list[float] = field(default_factory=list)

    def reconfigure(self, config: SuffixConfig) -> None:
        self.values.append(config.suffix_decoding_max_spec_factor)
        if self.fails and config.suffix_decoding_max_spec_factor != 1:
            raise RuntimeError("no")


@dataclass
class Drafts(DraftControl):
    """Notes the policies."""

    most: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(FixedPolicy(8))

    def use(self, policy: object) -> None:
        assert isinstance(policy, FixedPolicy)
        self.most.append(policy.allow(1).max_drafts)


def control_of(*proposers: Told) -> tuple[SpeculationControl, Drafts]:
    drafts = Drafts()
    members: list[dict[str, object]] = [
        {"method": "suffix", "num_speculative_tokens": 8 - i} for i in range(len(proposers))
    ]
    members[0]["policy"] = "fixed"
    return SpeculationControl(speculative_config(members), proposers, drafts), drafts


def factor(member: int, value: object) -> ProposerChange:
    return ProposerChange(member=member, parameters={"suffix_decoding_max_spec_factor": value})


def test_only_who_changes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Told(), Told()
    control, drafts = control_of(first, second)
    with caplog.at_level(logging.INFO):
        control.apply(SpeculationChange(proposers=[factor(1, 3)]))
        control.apply(SpeculationChange(num_speculative_tokens=2))
        control.apply(SpeculationChange(enabled=False))
        control.apply(SpeculationChange(enabled=False))
    assert (first.values, second.values) == ([], [3.0])
    assert drafts.most == [8, 2], "turning it off forgets nothing that was measured"
    assert not drafts.is_on
    assert [record.getMessage() for record in caplog.records] == [
        "speculation: proposers[1].suffix_decoding_max_spec_factor 1.0 -> 3.0",
        "speculation: num_speculative_tokens 8 -> 2",
        "speculation: enabled True -> False",
    ]


def test_a_refused_change_changes_nothing() -> None:
    first, second = Told(), Told()
    control, drafts = control_of(first, second)
    before = control.state
    with pytest.raises(InvalidRequest):
        control.apply(SpeculationChange(enabled=False, proposers=[factor(0, 2), factor(1, -1)]))
    assert (control.state, drafts.is_on, drafts.most, first.values) == (before, True, [], [])


def test_a_proposer_that_fails_takes_the_others_back() -> None:
    first, second = Told(), Told(fails=True)
    control, drafts = control_of(first, second)
    before = control.state
    with pytest.raises(RuntimeError):
        control.apply(SpeculationChange(enabled=False, proposers=[factor(0, 2), factor(1, 4)]))
    assert (first.values, second.values) == ([2.0, 1.0], [4.0, 1.0])
    assert (control.state, drafts.is_on, drafts.most) == (before, True, [])
