"""How the time of drafts is told, with events that the test records."""

from collections.abc import Iterator
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch

from server.worker.draft_time import NO_DRAFTS, DraftSpan, begin_span


class Event:
    """Implements what is used of torch.cuda.Event; at a time in milliseconds once it was recorded."""

    made: ClassVar[list["Event"]] = []

    def __init__(self, *, enable_timing: bool, external: bool) -> None:
        assert enable_timing
        assert external
        self.at_ms: float | None = None
        self.num_records = 0
        self.made.append(self)

    def record(self) -> None:
        self.num_records += 1

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, other: "Event") -> float:
        assert self.at_ms is not None
        assert other.at_ms is not None
        return other.at_ms - self.at_ms


@pytest.fixture
def span() -> Iterator[DraftSpan]:
    Event.made.clear()
    with patch("torch.cuda.Event", Event):
        yield begin_span(torch.device("cuda"))


def test_on_the_host_it_is_the_time_between() -> None:
    with patch("time.perf_counter", iter((10.0, 10.5)).__next__):
        measured = begin_span(torch.device("cpu"))
        measured.end()
    assert measured.seconds() == 0.5
    NO_DRAFTS.end()
    assert NO_DRAFTS.seconds() == 0.0


def test_on_the_device_it_is_the_time_between_two_events(span: DraftSpan) -> None:
    first, last = Event.made
    assert (first.num_records, last.num_records) == (1, 0)
    span.end()
    assert (first.num_records, last.num_records) == (1, 1)
    first.at_ms, last.at_ms = 5.0, 7.5
    assert span.seconds() == 0.0025


def test_a_replay_that_is_under_way_leaves_the_last_time(span: DraftSpan) -> None:
    first, last = Event.made
    assert span.seconds() == 0.0, "nothing is known yet"
    first.at_ms, last.at_ms = 5.0, 7.0
    assert span.seconds() == 0.002
    first.at_ms = 9.0  # by the next replay, whose last event is still to come
    assert span.seconds() == 0.002
    first.at_ms, last.at_ms = None, 7.0  # where that makes the event wait again
    assert span.seconds() == 0.002
    first.at_ms, last.at_ms = 9.0, 12.0
    assert span.seconds() == 0.003
