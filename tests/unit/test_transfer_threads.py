"""Threads that do what they are told, and are not waited for for ever."""

import logging
import threading
import weakref
from functools import partial

import pytest

from connectors.threads import Threads

TIMEOUT_S = 30.0


def test_work_is_done_in_its_order_by_as_many_threads_as_are_wanted() -> None:
    done: list[int] = []
    threads = Threads("one", 1)
    for number in range(5):
        threads.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    assert threads.end(TIMEOUT_S)
    assert done == [0, 1, 2, 3, 4]
    meeting = threading.Barrier(3)
    three = Threads("three", 3)
    for _ in range(3):
        three.submit(lambda: (meeting.wait(TIMEOUT_S), None)[1])
    assert three.end(TIMEOUT_S)
    assert not meeting.broken


def test_an_error_is_logged_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    threads = Threads("outrider-test", 1)
    threads.submit(lambda: done.remove(1))
    threads.submit(lambda: done.append(1))
    assert threads.end(TIMEOUT_S)
    assert done == [1]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "outrider-test" in caplog.text


def test_work_that_is_done_is_let_go_of() -> None:
    """What it holds may be large, and no other work need come."""
    held, is_gone = threading.Event(), threading.Event()
    weakref.finalize(held, is_gone.set)
    threads = Threads("one", 1)
    threads.submit(partial(threading.Event.set, held))
    assert held.wait(TIMEOUT_S)
    del held
    assert is_gone.wait(TIMEOUT_S)
    assert threads.end(TIMEOUT_S)


def test_work_that_hangs_is_not_waited_for_and_no_more_is_taken() -> None:
    gate, done = threading.Event(), []
    threads = Threads("hung", 1)
    threads.submit(lambda: (gate.wait(TIMEOUT_S), None)[1])
    threads.submit(lambda: done.append("before"))
    assert not threads.end(0.01)
    threads.submit(lambda: done.append("after"))
    gate.set()
    assert threads.end(TIMEOUT_S)
    assert done == ["before"]


def test_no_thread_starts_without_work() -> None:
    threads = Threads("idle", 4)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("idle")]
    assert threads.end(TIMEOUT_S)
