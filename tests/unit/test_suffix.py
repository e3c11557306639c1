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
from proposers.earlier_outputs import EarlierOutputs, OutputCursor
from proposers.suffix import CATCH_UP, LEAST_CATCH_UP, SuffixConfig, SuffixProposer
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


@given(st.lists(tokens, min_size=1, max_size=4), tokens, st.sampled_from([1, 3, 1000]))
def test_the_automaton_knows_short_substrings_and_their_followers(
    texts: list[list[int]], other: list[int], depth: int
) -> None:
    automaton = SuffixAutomaton(depth)
    for text in texts:
        last = ROOT
        for first in range(0, len(text), 3):
            last = automaton.extend(last, text[first : first + 3])
    place, num_matched = ROOT, 0
    for end, token_id in enumerate(other, 1):
        place, num_matched = automaton.follow(place, num_matched, [token_id])
        longest = next(n for n in range(end, -1, -1) if n == 0 or occurrences(texts, other[end - n : end]))
        assert min(num_matched, depth) == min(longest, depth)
        assert num_matched <= longest
        piece = other[end - min(longest, depth) : end]
        state, num_found = automaton.follow(ROOT, 0, piece)
        assert num_found == len(piece)
        if piece:
            places = occurrences(texts, piece)
            followers = Counter(texts[number][e] for number, e in places if e < len(texts[number]))
            assert set(automaton.following[state]) == set(followers)
            likeliest, share = automaton.continued(state, 1, 0.0)
            assert len(likeliest) == min(1, len(followers))
            for token_id in likeliest:
                assert followers[token_id] == max(followers.values())
                assert share == pytest.approx(followers[token_id] / sum(followers.values()))


def test_what_was_said_at_length_before_adds_nothing() -> None:
    automaton, sentence = SuffixAutomaton(4), [1, 2, 3, 4, 5, 6]
    last = automaton.extend(ROOT, sentence * 2)
    num_states = len(automaton.length)
    last = automaton.extend(last, sentence * 50)
    assert len(automaton.length) == num_states
    assert automaton.continued(last, 20, 0.0) == ((sentence * 4)[:20], 20.0)


@given(st.lists(tokens, min_size=1, max_size=4), st.integers(1, 5), st.sampled_from([2, 24]), st.integers(0, 3))
def test_what_was_put_off_comes_to_the_same(texts: list[list[int]], piece: int, depth: int, num_cached: int) -> None:
    """Outputs one after another: one proposer drafts behind each token, the other only at last."""
    found, late = (proposer(cached=num_cached, suffix_decoding_max_tree_depth=depth, least=0.0) for _ in range(2))
    for text in texts:
        for each in (found, late):
            start(each, [7, *text[:3]])
        for first in range(0, len(text), piece):
            found.extend(0, text[first : first + piece])
            found.propose(0, 16)
            late.extend(0, text[first : first + piece])
    late.propose(0, 16)  # a second step takes in what is left
    assert late.propose(0, 16) == found.propose(0, 16)


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
            outputs = EarlierOutputs(1000, depth=4)
            for number in range(200):
                output = OutputCursor(outputs, str(number % 3), ())
                output.note([number, 5, 6, 7])
                output.take_in(4)
            halves = [half for salt in "012" for half in (outputs.older(salt), outputs.written(salt, 0, is_new=False))]
        assert 100 < sum(len(half.length) for half in halves if half is not None) < 2 * 200 + 6

    def test_what_waits_is_bounded_as_well(self) -> None:
        """By tokens, and by requests; the last ones are kept."""
        for half_tokens, half_requests in ((40, 500), (1000, 10)):
            with patch.object(earlier_outputs, "MAX_HALF_TOKENS", half_tokens):
                outputs = EarlierOutputs(2 * half_requests, depth=4)
                for number in range(100):
                    output = OutputCursor(outputs, "", ())
                    output.note([100 + number, 5, 6, 7])
                    outputs.end(output)
                assert outputs.take_in_ended(1000) == 40
                assert [t for t in range(100, 200) if t in outputs.written("", 0, is_new=False).following[ROOT]] == [
                    *range(190, 200)
                ]

    def test_a_text_goes_on_in_a_new_half(self) -> None:
        """The half it was in is dropped while it runs."""
        with patch.object(earlier_outputs, "MAX_HALF_TOKENS", 8):
            found = proposer()
            start(found, [1])
            for token_id in range(50, 80):
                found.extend(0, [token_id])
                found.propose(0, 1)
            assert drafted(found, [2], [9, 77, 78], slot=1) == [79]
            assert drafted(found, [2], [9, 50, 51], slot=2) == []


def test_a_long_prompt_is_taken_in_step_by_step() -> None:
    found = proposer(cached=0)
    start(found, list(range(3 * CATCH_UP)))
    for step in range(3):
        found.extend(0, [step])
        assert found.propose(0, 4) == [*range(step + 1, 2 * step + 2)], "what is there of it is of use"
    found.extend(0, [5, 6, 7])
    assert found.propose(0, 3) == [8, 9, 10]


class TestWhileDraftsAreOff:
    """No proposal is asked for, or none for long."""

    def test_the_index_is_left_alone(self) -> None:
        found = proposer()
        with patch.object(SuffixAutomaton, "extend") as extend, patch.object(SuffixAutomaton, "follow") as follow:
            for number in range(20):
                start(found, [1, 2, 3, 4], slot=number % 2)
                for token_id in range(50):
                    found.extend(number % 2, [token_id])
        assert not extend.called
        assert not follow.called

    def test_all_sequences_together_catch_up_in_small_pieces(self) -> None:
        """A step takes in so many tokens at most, and all have their drafts in the end."""
        found, num_slots, half = proposer(cached=0), 16, [*range(300)]
        for slot in range(num_slots):
            start(found, [1000 + slot, *half], slot=slot)
            found.extend(slot, half)
        taken: list[int] = []
        extend = SuffixAutomaton.extend

        def counting(self: SuffixAutomaton, last: int, token_ids: list[int]) -> int:
            taken.append(len(token_ids))
            return extend(self, last, token_ids)

        num_steps = 0
        with patch.object(SuffixAutomaton, "extend", counting):
            while sum(taken) < num_slots * 601:
                before, num_steps = sum(taken), num_steps + 1
                for slot in range(num_slots):
                    found.propose(slot, 4)
                assert sum(taken) - before <= CATCH_UP + num_slots * LEAST_CATCH_UP
        assert 1 < num_steps < 20
        for slot in range(num_slots):
            found.extend(slot, [5, 6])
        assert [found.propose(slot, 4) for slot in range(num_slots)] == [[7, 8]] * num_slots

    def test_who_is_behind_finds_what_is_there(self) -> None:
        found = proposer()
        drafted(found, [1], [50, 51, 52, 53, 54, 55])
        start(found, [1], slot=1)
        found.extend(1, [*range(100, 100 + 2 * LEAST_CATCH_UP), 50, 51])
        assert found.propose(1, 4) == [52, 53]
        found.extend(1, [52])
        assert found.propose(1, 4) == [53, 54, 55]

    def test_outputs_of_the_time_are_found_later(self) -> None:
        """Of one whose slot was taken again, of one that has ended in its slot, and of one that still runs."""
        found = proposer()
        for slot, first in ((0, 100), (0, 200), (1, 300), (2, 400)):
            start(found, [1], slot=slot)
            found.extend(slot, [first, first + 1, first + 2, first + 3])
        start(found, [1], slot=0)
        for first in (100, 200, 300, 400):
            found.extend(0, [7, first, first + 1])
            assert found.propose(0, 4) == [first + 2, first + 3]


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
