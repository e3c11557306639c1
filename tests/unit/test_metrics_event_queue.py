"""The queue between the engine's threads and telemetry's."""

import logging
import threading

import pytest

from server.events import Event, TokensStreamed
from server.telemetry import event_queue
from server.telemetry.event_queue import EventQueue


def event(number: int) -> TokensStreamed:
    return TokensStreamed("r", number, 1, None)


def test_events_arrive_in_order_on_another_thread() -> None:
    seen: list[Event] = []
    threads: set[int] = set()

    def subscriber(item: Event) -> None:
        seen.append(item)
        threads.add(threading.get_ident())

    events = EventQueue([subscriber])
    for number in range(100):
        events.put_nowait(event(number))
    assert events.wait_processed(5)
    assert seen == [event(number) for number in range(100)]
    assert threads.isdisjoint({threading.get_ident()})
    events.close(5)


def test_a_subscriber_that_raises_hurts_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []

    def broken(_item: Event) -> None:
        raise RuntimeError("a bug")

    events = EventQueue([broken, seen.append])
    with caplog.at_level(logging.ERROR):
        for number in range(10):
            events.put_nowait(event(number))
        events.close(5)
    assert len(seen) == 10
    assert len(caplog.records) == 1


def test_a_stuck_subscriber_costs_events_and_not_memory_or_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_queue, "MAX_QUEUED_EVENTS", 5)
    is_running, may_go_on = threading.Event(), threading.Event()
    seen: list[Event] = []

    def stuck(item: Event) -> None:
        is_running.set()
        may_go_on.wait()
        seen.append(item)

    events = EventQueue([stuck])
    events.put_nowait(event(0))
    assert is_running.wait(30)
    for number in range(1, 9):
        events.put_nowait(event(number))
    assert not events.wait_processed(0.01)
    events.close(0.01)
    may_go_on.set()
    events.close(5)
    assert events.num_dropped == 3
    assert seen == [event(number) for number in range(6)]
