"""Work on a passing thread: its result or error comes back, and the thread is gone."""

import threading

import pytest

from server.passing_thread import run_in_passing_thread


def test_the_result_comes_back_and_the_thread_is_gone() -> None:
    before = set(threading.enumerate())
    assert run_in_passing_thread(lambda: threading.current_thread().name, "passing") == "passing"
    assert set(threading.enumerate()) == before


def test_an_error_comes_back() -> None:
    def fail() -> None:
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        run_in_passing_thread(fail, "passing")
