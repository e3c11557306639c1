"""Which threads a test leaves running."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

ENDS_WITHIN_S = 30.0


@contextmanager
def no_thread_is_left() -> Iterator[None]:
    """Every thread that starts inside ends soon after it, without being asked again.

    A thread that was told to end, or whose last act is its own end, may still be seen for a moment, so each is given
    time. What ran before is none of this test's.
    """
    before = set(threading.enumerate())
    yield
    until_s = time.monotonic() + ENDS_WITHIN_S
    started = [thread for thread in threading.enumerate() if thread not in before]
    for thread in started:
        thread.join(max(0.0, until_s - time.monotonic()))
    assert [thread.name for thread in started if thread.is_alive()] == []
