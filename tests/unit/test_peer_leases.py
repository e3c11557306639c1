"""Blocks that are held for other nodes."""

import threading
from collections.abc import Callable

import pytest

from connectors.peer.leases import LeaseLost, LeaseTable
from connectors.peer.sweeper import LeaseSweeper

HASHES = (b"x", b"y")


class Clock:
    """Shows what it is set to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def table(clock: Callable[[], float], notify: Callable[[], None] = lambda: None) -> LeaseTable:
    return LeaseTable(lease_s=30.0, peer_timeout_s=3.0, clock=clock, notify=notify)


def grant(leases: LeaseTable, seq_id: int = 0) -> str:
    return leases.grant(seq_id, (3, 4), HASHES)


def not_stopped() -> None:
    raise AssertionError("nobody is to stop this reader")


def test_a_lease_ends_once(clock: Clock) -> None:
    notified: list[int] = []
    leases = table(clock, lambda: notified.append(len(leases)))
    lease_id = grant(leases)
    leases.end(lease_id)
    leases.end(lease_id)
    leases.sweep()
    assert leases.take_released() == (lease_id,)
    assert leases.take_released() == ()
    assert notified == [0]


def test_names_can_not_be_guessed(clock: Clock) -> None:
    leases = table(clock)
    names = {grant(leases) for _ in range(100)}
    assert len(names) == 100
    assert {len(bytes.fromhex(name)) for name in names} == {16}


@pytest.mark.parametrize(("waited_s", "is_over"), [(29.9, False), (30.0, True)])
def test_a_lease_that_nobody_takes_ends_in_time(clock: Clock, waited_s: float, is_over: bool) -> None:
    leases = table(clock)
    lease_id = grant(leases)
    clock.now_s += waited_s
    leases.sweep()
    assert leases.take_released() == ((lease_id,) if is_over else ())


def test_an_older_lease_that_is_renewed_does_not_hide_one_that_is_not(clock: Clock) -> None:
    leases = table(clock)
    renewed, forgotten = grant(leases), grant(leases)
    for _ in range(15):
        clock.now_s += 2.0
        assert leases.renew(renewed)
        leases.sweep()
    assert leases.take_released() == (forgotten,)
    assert len(leases) == 1


def test_signs_of_life_that_stop_end_a_lease(clock: Clock) -> None:
    leases = table(clock)
    lease_id = grant(leases)
    assert leases.renew(lease_id)
    clock.now_s += 2.9
    leases.sweep()
    assert leases.take_released() == ()
    clock.now_s += 0.1
    leases.sweep()
    assert leases.take_released() == (lease_id,)


def test_a_lease_whose_time_is_up_is_not_renewed_before_it_is_swept(clock: Clock) -> None:
    leases = table(clock)
    lease_id = grant(leases)
    clock.now_s += 30.0
    assert not leases.renew(lease_id)
    with pytest.raises(LeaseLost), leases.reading(lease_id, not_stopped):
        pass
    leases.sweep()
    assert leases.take_released() == (lease_id,)
    assert not leases.renew(lease_id)


def test_who_reads_is_stopped_and_waited_for(clock: Clock) -> None:
    leases = table(clock)
    lease_id = grant(leases)
    stopped: list[str] = []
    with leases.reading(lease_id, lambda: stopped.append("first")) as blocks:
        assert (blocks.block_ids, blocks.hashes) == ((3, 4), HASHES)
        with leases.reading(lease_id, lambda: stopped.append("second")):
            clock.now_s += 3.0
            leases.sweep()
            assert stopped == ["first", "second"]
            assert leases.take_released() == ()
            with pytest.raises(LeaseLost), leases.reading(lease_id, not_stopped):
                pass
        assert leases.take_released() == ()
    assert leases.take_released() == (lease_id,)


def test_an_acknowledgement_stops_nobody_but_lets_nobody_in(clock: Clock) -> None:
    leases = table(clock)
    lease_id = grant(leases)
    with leases.reading(lease_id, not_stopped):
        leases.end(lease_id)
        assert not leases.renew(lease_id)
        assert leases.take_released() == ()
    assert leases.take_released() == (lease_id,)


def test_a_reader_that_stays_behind_its_acknowledgement_is_stopped_in_time(clock: Clock) -> None:
    leases = table(clock)
    lease_id = grant(leases)
    stopped: list[int] = []
    with leases.reading(lease_id, lambda: stopped.append(0)):
        leases.end(lease_id)
        clock.now_s += 3.0
        leases.sweep()
    assert stopped == [0]


def test_reading_is_a_sign_of_life(clock: Clock) -> None:
    leases = table(clock)
    lease_id = grant(leases)
    clock.now_s += 29.0
    with leases.reading(lease_id, not_stopped):
        clock.now_s += 2.0
        leases.sweep()
    leases.sweep()
    assert leases.take_released() == ()


def test_a_sequence_that_is_cancelled_holds_nothing(clock: Clock) -> None:
    leases = table(clock)
    cancelled, kept = grant(leases, 1), grant(leases, 2)
    leases.cancel(1)
    leases.cancel(3)
    assert leases.take_released() == (cancelled,)
    assert leases.renew(kept)


def test_the_sweeper_needs_no_traffic(clock: Clock) -> None:
    released = threading.Event()
    leases = table(clock, released.set)
    sweeper = LeaseSweeper(leases, 0.005)
    lease_id = grant(leases)
    clock.now_s += 30.0
    assert released.wait(30.0)
    assert leases.take_released() == (lease_id,)
    sweeper.close(30.0)
    sweeper.close(30.0)


def test_closing_ends_all_leases(clock: Clock) -> None:
    leases = table(clock)
    sweeper = LeaseSweeper(leases, 60.0)
    lease_id = grant(leases)
    sweeper.close(30.0)
    assert leases.take_released() == (lease_id,)
    assert "outrider-kv-leases" not in {thread.name for thread in threading.enumerate()}
