"""Work on a passing thread: its result or error comes back, and the thread is gone."""

import threading

import pytest

from server.passing_thread import run_in_passing_thread
from tests.fakes.thread_watch import no_thread_is_left


def test_the_result_comes_back_and_the_thread_is_gone() -> None:
    with no_thread_is_left():
        assert run_in_passing_thread(lambda: threading.current_thread().name, "passing") == "passing"


def test_an_error_comes_back() -> None:
    def fail() -> None:
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        run_in_passing_thread(fail, "passing")
