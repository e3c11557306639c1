"""What a change makes of what holds, and what is refused."""

from typing import Any

import pytest

from proposers.config import ProposerConfig
from proposers.suffix import SuffixConfig
from server.errors import InvalidRequest
from server.speculation_state import WITHOUT, ProposerChange, SpeculationChange, SpeculationState
from tests.fakes.front import tiny_model_info
from tests.fakes.speculative import speculative_config

PERIOD = "tests.fakes.example_proposers:PeriodConfig"


class Anything:
    """A proposer that takes on whatever it is told."""

    def __init__(self) -> None:
        self.told: list[ProposerConfig] = []

    def reconfigure(self, config: ProposerConfig) -> None:
        self.told.append(config)


def state_of(*members: dict[str, object], proposers: list[object] | None = None) -> SpeculationState:
    return SpeculationState.of(speculative_config(list(members)), proposers or [Anything() for _ in members])


def refusals(state: SpeculationState, **change: Any) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        state.changed(SpeculationChange(**change))
    return {violation.field: violation.description for violation in caught.value.violations}


SUFFIX = state_of({"method": "suffix", "num_speculative_tokens": 6})
BOTH = state_of(
    {"method": "suffix"}, {"method": PERIOD, "period": 4}, {"method": "suffix", "num_speculative_tokens": 2}
)
NONE = SpeculationState.of(None, ())


def test_only_what_is_given_changes() -> None:
    assert SUFFIX.changed(SpeculationChange()) == SUFFIX
    lower = SUFFIX.changed(SpeculationChange(num_speculative_tokens=2))
    assert (lower.num_speculative_tokens, lower.max_num_speculative_tokens, lower.enabled) == (2, 6, True)
    off = lower.changed(SpeculationChange(enabled=False))
    assert (off.max_drafts, off.num_speculative_tokens) == (0, 2)
    on = off.changed(SpeculationChange(enabled=True, num_speculative_tokens=6))
    assert on == SUFFIX


def test_a_schedule_and_a_policy_take_each_other_s_place() -> None:
    fixed = SUFFIX.changed(SpeculationChange(policy={"policy": "fixed"}))
    scheduled = fixed.changed(SpeculationChange(policy={"num_speculative_tokens_per_batch_size": {1: 5, 8: 0}}))
    again = scheduled.changed(SpeculationChange(policy={"policy": "auto"}))
    assert [state.settings()["policy"] for state in (fixed, scheduled, again)] == ["fixed", {1: 5, 8: 0}, "auto"]
    lower = scheduled.changed(SpeculationChange(num_speculative_tokens=3))
    assert lower.policy == scheduled.policy, "what bounds a schedule may go down and up again"


@pytest.mark.parametrize("member", [None, 0, "suffix"])
def test_a_parameter_of_the_only_proposer(member: int | str | None) -> None:
    change = ProposerChange(member=member, parameters={"suffix_decoding_max_spec_factor": 2})
    after = SUFFIX.changed(SpeculationChange(proposers=[change])).members[0].config
    assert isinstance(after, SuffixConfig)
    assert after.suffix_decoding_max_spec_factor == 2.0
    assert after.model_copy(update={"suffix_decoding_max_spec_factor": 1.0}) == SUFFIX.members[0].config


def test_members_by_their_place() -> None:
    change = ProposerChange(member=2, parameters={"suffix_decoding_min_token_prob": 0.5})
    after = BOTH.changed(SpeculationChange(proposers=[change]))
    assert after.members[:2] == BOTH.members[:2]
    assert after.settings()["proposers[2].suffix_decoding_min_token_prob"] == 0.5


@pytest.mark.parametrize(
    ("state", "change", "expected"),
    [
        (
            SUFFIX,
            {"num_speculative_tokens": 7},
            {"num_speculative_tokens": "must be from 1 to 6, which the server was started with, got 7"},
        ),
        (
            SUFFIX,
            {"num_speculative_tokens": 0},
            {"num_speculative_tokens": "must be from 1 to 6, which the server was started with, got 0"},
        ),
        (SUFFIX, {"policy": {"policy": "never"}}, {"policy": "must be one of auto, fixed, got 'never'"}),
        (
            SUFFIX,
            {"policy": {"num_speculative_tokens_per_batch_size": {0: 3}}},
            {
                "num_speculative_tokens_per_batch_size": "must name at least one number of rows, from 1 on, "
                "and from 0 to 32 drafts for each, got {0: 3}"
            },
        ),
        (
            SUFFIX,
            {"policy": {"num_speculative_tokens_per_batch_size": {1: 6, 4: 7}}},
            {
                "num_speculative_tokens_per_batch_size": "must have from 0 to 6 drafts, which is "
                "num_speculative_tokens, for each number of rows, got {1: 6, 4: 7}"
            },
        ),
        (
            SUFFIX,
            {"num_speculative_tokens": 2, "policy": {"num_speculative_tokens_per_batch_size": {1: 3}}},
            {
                "num_speculative_tokens_per_batch_size": "must have from 0 to 2 drafts, which is "
                "num_speculative_tokens, for each number of rows, got {1: 3}"
            },
        ),
        (NONE, {"enabled": True}, {"enabled": WITHOUT}),
        (
            NONE,
            {"num_speculative_tokens": 1, "policy": {"policy": "auto"}},
            {"num_speculative_tokens": WITHOUT, "policy": WITHOUT},
        ),
    ],
)
def test_refusals(state: SpeculationState, change: dict[str, object], expected: dict[str, str]) -> None:
    assert refusals(state, **change) == expected


@pytest.mark.parametrize(
    ("state", "member", "parameters", "expected"),
    [
        (SUFFIX, 1, {}, {"index": "must be from 0 to 0, got 1"}),
        (SUFFIX, "ngram", {}, {"method": "must be one of suffix, got ngram"}),
        (BOTH, "suffix", {}, {"index": f"must say which of suffix, {PERIOD}, suffix is meant, counted from 0"}),
        (BOTH, None, {}, {"index": f"must say which of suffix, {PERIOD}, suffix is meant, counted from 0"}),
        (
            BOTH,
            1,
            {"period": 5},
            {"parameters.period": f"cannot change while the server runs; nothing of {PERIOD} can"},
        ),
        (
            SUFFIX,
            None,
            {"num_speculative_tokens": 1},
            {
                "parameters.num_speculative_tokens": "cannot change while the server runs; "
                "suffix_decoding_max_cached_requests, suffix_decoding_max_spec_factor, "
                "suffix_decoding_max_tree_depth, suffix_decoding_min_token_prob of suffix can"
            },
        ),
        (SUFFIX, None, {"x": 1}, {"parameters.x": "no such setting; suffix_decoding_max_cached_requests, suffix_"}),
        (
            SUFFIX,
            None,
            {"suffix_decoding_max_tree_dept": 3},
            {"parameters.suffix_decoding_max_tree_dept": "no such setting; did you mean suffix_decoding_max_tree"},
        ),
        (
            SUFFIX,
            None,
            {"suffix_decoding_min_token_prob": 2, "suffix_decoding_max_tree_depth": "deep"},
            {
                "parameters.suffix_decoding_min_token_prob": "must be a number >= 0 and <= 1, got 2",
                "parameters.suffix_decoding_max_tree_depth": "must be an integer >= 1 and <= 1024, got 'deep'",
            },
        ),
        (NONE, 0, {}, {"parameters": WITHOUT}),
    ],
)
def test_refused_parameters(
    state: SpeculationState, member: int | str | None, parameters: dict[str, object], expected: dict[str, str]
) -> None:
    found = refusals(state, proposers=[ProposerChange(member=member, parameters=parameters)])
    assert found.keys() == {f"proposers[0].{name}" for name in expected}
    for name, words in expected.items():
        assert found[f"proposers[0].{name}"].startswith(words)


def test_all_refusals_are_told_at_once() -> None:
    changes = [ProposerChange(parameters={"x": 1}), ProposerChange(member=9, parameters={})]
    found = refusals(SUFFIX, num_speculative_tokens=9, policy={"policy": "x"}, proposers=changes)
    assert list(found) == ["num_speculative_tokens", "policy", "proposers[0].parameters.x", "proposers[1].index"]


def test_a_proposer_that_takes_nothing_on_has_nothing_to_change() -> None:
    state = state_of({"method": "suffix"}, proposers=[object()])
    assert state.members[0].changeable == frozenset()


def test_the_model_s_description_says_what_holds() -> None:
    info = tiny_model_info()
    for change, expected in (
        (SpeculationChange(num_speculative_tokens=2), ("suffix", 2)),
        (SpeculationChange(enabled=False), ("none", 0)),
    ):
        told = SUFFIX.changed(change).reported(info)
        assert (told.speculative_method, told.num_speculative_tokens) == expected
