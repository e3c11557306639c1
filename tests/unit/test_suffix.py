"""Suffix decoding: the index against plain lists, and what is drafted from it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proposers import earlier_outputs
from proposers.base import SequenceText
from proposers.earlier_outputs import EarlierOutputs
from proposers.suffix import CATCH_UP, SuffixConfig, SuffixProposer
from proposers.suffix_automaton import ROOT, SuffixAutomaton

tokens = st.lists(st.integers(0, 3), max_size=40)


def proposer(**values: Any) -> SuffixProposer:
    names = {"factor": "max_spec_factor", "least": "min_token_prob", "cached": "max_cached_requests"}
    settings = {f"suffix_decoding_{names[name]}": value for name, value in values.items() if name in names}
    rest = {name: value for name, value in values.items() if name not in names}
    return SuffixProposer(SuffixConfig(method="suffix", **{"num_speculative_tokens": 16, **settings, **rest}))


def drafted(
    found: SuffixProposer, prompt: Sequence[int], output: Sequence[int], most: int = 16, slot: int = 0
) -> list[int]:
    """What comes after an output, which settles token by token."""
    start(found, prompt, slot=slot)
    for token_id in output:
        found.extend(slot, [token_id])
    return found.propose(slot, most)


def start(found: SuffixProposer, prompt: Sequence[int], *, slot: int = 0, salt: str = "") -> None:
    found.start(slot, SequenceText(tuple(prompt), len(prompt), salt))


def occurrences(texts: Sequence[Sequence[int]], piece: Sequence[int]) -> list[tuple[int, int]]:
    """(text, end) of each place where a piece ends."""
    size = len(piece)
    return [
        (number, end)
        for number, text in enumerate(texts)
        for end in range(size, len(text) + 1)
        if list(text[end - size : end]) == list(piece)
    ]


@given(st.lists(tokens, min_size=1, max_size=4), tokens)
def test_the_automaton_knows_every_substring_and_its_followers(texts: list[list[int]], other: list[int]) -> None:
    automaton = SuffixAutomaton(1000)
    for text in texts:
        last = ROOT
        for token_id in text:
            last = automaton.extend(last, token_id)
        assert list(automaton.suffixes(last))[:1] in ([last], [])
    place, num_matched = ROOT, 0
    for end, token_id in enumerate(other, 1):
        place, num_matched = automaton.follow(place, num_matched, token_id)
        longest = next(n for n in range(end, -1, -1) if n == 0 or occurrences(texts, other[end - n : end]))
        assert num_matched == longest
        if longest:
            places = occurrences(texts, other[end - longest : end])
            followers = Counter(texts[number][e] for number, e in places if e < len(texts[number]))
            assert set(automaton.following[place]) == set(followers)
            if followers:
                best, _, share = automaton.likeliest(place)
                assert followers[best] == max(followers.values())
                assert share == pytest.approx(followers[best] / sum(followers.values()))


@given(tokens)
def test_what_repeats_itself_is_found_at_its_longest(text: list[int]) -> None:
    """Any draft continues the longest suffix of the text that something followed."""
    found = proposer(cached=0, least=0.0, factor=64.0)
    drafts = drafted(found, [9, *text[:1]], text[1:]) if text else []
    whole = [9, *text]
    matches = [n for n in range(1, len(whole)) if len(occurrences([whole], whole[-n:])) > 1]
    if text and len(text) > 1:
        assert bool(drafts) == bool(matches)
    if drafts:
        assert occurrences([whole], [*whole[-max(matches) :], drafts[0]])


class TestLength:
    PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)

    def test_a_longer_match_allows_more(self) -> None:
        assert drafted(proposer(cached=0), self.PROMPT, [20, 3]) == [4]
        assert drafted(proposer(cached=0), self.PROMPT, [20, 3, 4, 5]) == [6, 7, 8]
        assert drafted(proposer(cached=0, factor=2.0), self.PROMPT, [20, 3, 4]) == [5, 6, 7, 8]
        assert drafted(proposer(cached=0, factor=0.5), self.PROMPT, [20, 3]) == []

    def test_the_depth_bounds_what_a_match_counts(self) -> None:
        assert drafted(proposer(cached=0, suffix_decoding_max_tree_depth=2), self.PROMPT, [20, 3, 4, 5]) == [6, 7]

    def test_the_caller_bounds_it(self) -> None:
        assert drafted(proposer(cached=0), self.PROMPT, [20, 3, 4, 5], most=2) == [6, 7]

    def test_it_ends_where_it_becomes_unlikely(self) -> None:
        """After 1 2 comes 3 twice and 4 once; each goes on in its own way."""
        prompt = [1, 2, 3, 30, 31, 0, 1, 2, 4, 40, 41, 0, 1, 2, 3, 50, 51, 0]
        assert drafted(proposer(cached=0, least=0.5), prompt, [8, 1, 2]) == [3]
        assert drafted(proposer(cached=0, least=0.7), prompt, [8, 1, 2]) == []
        assert len(drafted(proposer(cached=0, least=0.3), prompt, [8, 1, 2])) == 2


class TestEarlierOutputs:
    def test_an_answer_is_drafted_from_an_earlier_one(self) -> None:
        found = proposer()
        drafted(found, [1], [2, 50, 51, 52, 53, 54])
        assert drafted(found, [1, 3], [4, 50, 51, 52], slot=1) == [53, 54]

    def test_prompts_are_not_shared(self) -> None:
        found = proposer()
        drafted(found, [50, 51, 52, 53, 54], [1])
        assert drafted(found, [3], [4, 50, 51, 52], slot=1) == []

    def test_those_that_run_help_each_other(self) -> None:
        found = proposer()
        start(found, [1], slot=0)
        start(found, [1], slot=1)
        for token_id in (50, 51, 52):
            found.extend(0, [token_id])
        found.extend(1, [9, 50])
        assert found.propose(1, 4) == [51]
        found.extend(0, [53])
        found.extend(1, [51, 52])
        assert found.propose(1, 4) == [53]

    def test_another_salt_sees_nothing(self) -> None:
        found = proposer()
        for slot, salt in enumerate(("", "a", "")):
            start(found, [1], slot=slot, salt=salt)
        found.extend(0, [50, 51, 52, 53])
        for slot in (1, 2):
            found.extend(slot, [9, 50, 51])
        assert found.propose(1, 4) == []
        assert found.propose(2, 4) == [52, 53]

    def test_none_is_kept_unless_asked_for(self) -> None:
        found = proposer(cached=0)
        drafted(found, [1], [2, 50, 51, 52, 53])
        assert drafted(found, [1, 3], [4, 50, 51], slot=1) == []

    def test_the_surer_of_both_is_taken(self) -> None:
        """The text has seen 50 51 once; earlier ones know a longer match."""
        found = proposer()
        drafted(found, [1], [60, 50, 51, 70, 71, 72])
        assert drafted(found, [50, 51, 80, 81], [60, 50, 51], slot=1) == [70, 71, 72]

    def test_only_so_many_are_remembered(self) -> None:
        found = proposer(cached=4)
        drafted(found, [1], [50, 51, 52])
        for number in range(5):
            drafted(found, [1], [100 + number], slot=1)
        assert drafted(found, [1], [9, 50], slot=2) == []

    def test_memory_is_bounded_by_tokens(self) -> None:
        with patch.object(earlier_outputs, "MAX_HALF_TOKENS", 100):
            outputs = EarlierOutputs(1000, num_counted=4)
            for number in range(200):
                outputs.begin(str(number % 3)).extend([number, 5, 6, 7])
            states = sum(len(automaton.length) for salt in "012" for automaton in outputs.read(salt))
        assert 100 < states < 2 * 200 + 6

    def test_a_text_goes_on_in_a_new_half(self) -> None:
        """The half it was in is dropped while it runs."""
        with patch.object(earlier_outputs, "MAX_HALF_TOKENS", 8):
            found = proposer()
            start(found, [1])
            for token_id in range(50, 80):
                found.extend(0, [token_id])
            assert drafted(found, [2], [9, 77, 78], slot=1) == [79]
            assert drafted(found, [2], [9, 50, 51], slot=2) == []


def test_a_long_prompt_is_taken_in_step_by_step() -> None:
    found = proposer(cached=0)
    start(found, list(range(3 * CATCH_UP)))
    for step in range(3):
        assert found.propose(0, 4) == []
        found.extend(0, [step])
    found.extend(0, [5, 6, 7])
    assert found.propose(0, 3) == [8, 9, 10]


def test_a_slot_forgets_its_last_sequence() -> None:
    found = proposer(cached=0)
    drafted(found, [50, 51, 52], [1])
    assert drafted(found, [1, 2], [9, 50]) == []


class TestReconfigure:
    """Every case begins with two outputs, 50 to 54 in slot 0, and 9 50 51 52 in slot 1."""

    def begun(self, **values: Any) -> SuffixProposer:
        found = proposer(**values)
        drafted(found, [1], [2, 50, 51, 52, 53, 54])
        drafted(found, [1, 3], [9, 50, 51, 52], slot=1)
        return found

    def reconfigure(self, found: SuffixProposer, **values: Any) -> None:
        found.reconfigure(proposer(**values)._config)

    def test_limits_hold_at_once(self) -> None:
        found = self.begun()
        assert found.propose(1, 4) == [53, 54]
        self.reconfigure(found, factor=0.34)
        assert found.propose(1, 4) == [53]
        self.reconfigure(found, suffix_decoding_max_tree_depth=1)
        assert found.propose(1, 4) == [53]

    def test_earlier_outputs_go_and_come_back_empty(self) -> None:
        found = self.begun()
        self.reconfigure(found, cached=0)
        assert found.propose(1, 4) == []
        found.extend(1, [53])
        self.reconfigure(found, cached=10)
        assert drafted(found, [7], [8, 50, 51], slot=2) == []
        assert drafted(found, [7], [6, 50], slot=3) == [51]

    def test_fewer_earlier_outputs_as_others_come(self) -> None:
        found = self.begun(cached=100)
        self.reconfigure(found, cached=2)
        assert found.propose(1, 4) == [53, 54], "those of before go with the next ones"
        drafted(found, [1], [100], slot=2)
        drafted(found, [1], [101], slot=3)
        assert drafted(found, [7], [8, 50, 51], slot=4) == []
