"""How long a step spends on drafts, told without waiting for the device."""

import time
from typing import Protocol

import torch


class DraftSpan(Protocol):
    """A part of a step that goes into drafts; begins when it is made."""

    def end(self) -> None:
        """That was it."""

    def seconds(self) -> float:
        """How long it took; once the step has settled."""


class _Nothing:
    def end(self) -> None:
        pass

    def seconds(self) -> float:
        return 0.0


class _HostSpan:
    """On the clock, where operators have run when they return."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began_s = time.perf_counter()

    def end(self) -> None:
        self._seconds = time.perf_counter() - self._began_s

    def seconds(self) -> float:
        return self._seconds


class _DeviceSpan:
    """Between two events on the current stream; captured in a graph, each replay records both anew.

    So when it is read, the next step may have recorded one of them already, or both: the time of the next step is as
    good, and where only one is there, the last time is told again.
    """

    def __init__(self) -> None:
        # External: a node of the graph, which may be read from outside.
        self._first, self._last = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        self._seconds = 0.0
        self._first.record()

    def end(self) -> None:
        self._last.record()

    def seconds(self) -> float:
        if self._first.query() and self._last.query():
            seconds = self._first.elapsed_time(self._last) / 1e3
            if seconds >= 0:
                self._seconds = seconds
        return self._seconds


NO_DRAFTS: DraftSpan = _Nothing()


def begin_span(device: torch.device) -> DraftSpan:
    """Begin to time what is queued on the current stream of a device."""
    return _DeviceSpan() if device.type == "cuda" else _HostSpan()
