"""Stop strings in text that arrives in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.stop_strings import StopMatch, find_stop, held_back_length

TEXTS = st.text("ab", max_size=10)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize("num_seen", range(5))
def test_a_match_may_begin_in_what_was_seen(num_seen: int) -> None:
    assert find_stop("xSTOPy", num_seen, ["STOP"]) == StopMatch("STOP", 1)


def test_a_match_that_ended_before_is_none() -> None:
    assert find_stop("xSTOPy", 5, ["STOP"]) is None
    assert find_stop("", 0, ["STOP"]) is None


def test_the_one_that_starts_first_wins() -> None:
    assert find_stop("abcd", 0, ["cd", "bc"]) == StopMatch("bc", 1)
    assert find_stop("abcd", 0, ["b", "bc"]) == StopMatch("b", 1)
    match = find_stop("abcd", 0, ["bc"])
    assert match is not None
    assert match.end == 3


@given(text=TEXTS, num_seen=st.integers(0, 10), stops=STOPS)
def test_find_stop_against_the_definition(text: str, num_seen: int, stops: list[str]) -> None:
    found = [
        (start, index)
        for index, stop in enumerate(stops)
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > num_seen
    ]
    match = find_stop(text, num_seen, stops)
    assert match == (StopMatch(stops[min(found)[1]], min(found)[0]) if found else None)


@given(text=TEXTS, stops=STOPS)
def test_held_back_is_the_longest_beginning_of_a_stop(text: str, stops: list[str]) -> None:
    ends = [text[start:] for start in range(len(text) + 1)]
    expected = max(len(end) for end in ends if end == "" or any(s.startswith(end) and s != end for s in stops))
    assert held_back_length(text, stops) == expected
