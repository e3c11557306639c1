"""How long the step thread waited for the interpreter lock."""

import asyncio
import ctypes
import sys
import threading
import time
from pathlib import Path

import pytest

from server.engine.lock_wait import blocked_clock, queue_clock
from server.events import StepFinished
from tests.fakes.core import make_request
from tests.fakes.native_engine import running_engine

HOLD_US, NUM_HOLDS = 10_000, 10


def test_neither_running_nor_queued_is_blocked() -> None:
    walls, cpus, queues = iter((10.0, 25.0)), iter((4.0, 9.0)), iter((1.0, 2.5))
    clock = blocked_clock(lambda: next(walls), lambda: next(cpus), lambda: next(queues))
    first = clock()
    assert clock() - first == 15.0 - 5.0 - 1.5


def test_the_wait_for_a_core_is_the_second_number(tmp_path: Path) -> None:
    file = tmp_path / "schedstat"
    file.write_text("17 2500000000 3\n")
    clock = queue_clock(str(file))
    assert clock() == 2.5
    file.write_text("18 4000000000 4\n")
    assert clock() == 4.0, "read anew each time"


def test_without_a_count_no_wait_for_a_core_is_known(tmp_path: Path) -> None:
    assert queue_clock(str(tmp_path / "none"))() == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the wait for a core is part of it")
def test_a_thread_that_holds_the_lock_is_waited_for() -> None:
    hold = ctypes.PyDLL(None).usleep  # unlike time.sleep it keeps the lock
    clock = blocked_clock()

    def spend(seconds: float) -> float:
        before_s, end_s = clock(), time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            time.sleep(0)  # lets go of the lock, as every operator does
        return clock() - before_s

    def hog() -> None:
        for _ in range(NUM_HOLDS):
            hold(HOLD_US)

    def wait_for_hog() -> float:
        other = threading.Thread(target=hog)
        before_s = clock()
        other.start()
        while other.is_alive():
            time.sleep(0)
        return clock() - before_s

    held_s = NUM_HOLDS * HOLD_US / 1e6
    # On a busy machine this thread may lack a core while the lock is held, and virtual ones stand still at times.
    assert any(spend(0.02) < held_s / 2 for _ in range(20))
    assert any(wait_for_hog() > held_s / 2 for _ in range(20))


@pytest.mark.parametrize("depth", [0, 1])
async def test_each_step_reports_its_share_and_idling_counts_for_none(depth: int) -> None:
    """The fake clock goes on by 1 per reading: a step reads it once, and the end of an idle time once more."""
    readings = iter(range(10_000))
    async with running_engine(depth=depth, blocked_clock=lambda: float(next(readings))) as harness:
        for round_number in range(3):
            await harness.generate(make_request(f"r{round_number}", range(3), max_tokens=4))
            await harness.all_blocks_are_free()
        waits_s = [event.lock_wait_s for event in harness.events if isinstance(event, StepFinished)]
    assert len(waits_s) >= 12
    assert set(waits_s) == {1.0}


async def test_a_step_that_waited_says_how_long() -> None:
    blocked_s = 0.0
    async with running_engine(blocked_clock=lambda: blocked_s) as harness:
        harness.executor.may_settle.clear()
        stream = harness.submit(make_request("a", range(3), max_tokens=2))
        assert await asyncio.to_thread(harness.executor.is_settling.wait, 30)
        blocked_s = 0.25
        harness.executor.may_settle.set()
        async for _ in stream:
            pass
        waits_s = [event.lock_wait_s for event in harness.events if isinstance(event, StepFinished)]
    assert waits_s == [0.25, 0.0]
