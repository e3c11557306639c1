"""How long a thread has waited for the interpreter lock.

CPython does not say, so it is found by subtraction. A thread is running (its CPU clock counts
that), runnable without a core (Linux counts that, too), or asleep; and a step has nothing else to
sleep for than the lock: it computes on this thread, and CUDA's events are waited for by spinning.
What else may sleep is counted along, which makes this an upper bound: mainly operators of several
threads, when one of those is kept from its core for longer than the others spin. With nobody else
in Python the bound stays at 1% of a step with one thread, at 2 to 5% with two on two cores.

Timing a release of the lock, such as time.sleep(0), was the other way. It measures one release of
the dozens in a step, and gives the lock away once more to do so; reading clocks does neither.
"""

import ctypes
import os
import time
import weakref
from collections.abc import Callable

_SCHEDSTAT = "/proc/thread-self/schedstat"
"""Of a Linux thread: nanoseconds that it ran and that it waited for a core, and how often it ran."""
_MAX_LINE_NBYTES = 96


def blocked_clock(
    wall: Callable[[], float] = time.perf_counter,
    cpu: Callable[[], float] = time.thread_time,
    queued: Callable[[], float] | None = None,
) -> Callable[[], float]:
    """A clock of the seconds that this thread has been asleep; only differences mean something.

    Must be made and read on the thread it is of, and costs a few microseconds.

    Args:
        wall, cpu: seconds that have passed, and those in which the thread ran.
        queued: seconds that it waited for a core; the system's count if not given, and 0 where
            there is none: then that wait is part of the result.
    """
    wait_for_core = queue_clock() if queued is None else queued
    return lambda: wall() - cpu() - wait_for_core()


def queue_clock(path: str = _SCHEDSTAT) -> Callable[[], float]:
    """A clock of the seconds that this thread was runnable and had no core; always 0 where the system has no count.

    It holds the file open until it is garbage itself.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return lambda: 0.0
    # os.pread would let go of the lock, and whoever waits for it would have it: the clock would make what it measures.
    pread = ctypes.PyDLL(None).pread
    pread.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long)
    line = ctypes.create_string_buffer(_MAX_LINE_NBYTES)

    def read() -> float:
        pread(descriptor, line, _MAX_LINE_NBYTES - 1, 0)
        return int(line.value.split()[1]) / 1e9

    weakref.finalize(read, os.close, descriptor)
    return read
