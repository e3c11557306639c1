"""What travels between host and device with each step: one copy there, one copy back.

Every number a step uploads is put into one pinned buffer, which is copied in one go to a buffer that
stays at its place on the device. Device work runs in order, so one device buffer serves all steps; the
pinned ones belong to a step until it has settled.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes; what kernels expect of a pointer."""
_NUMPY_TYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}

Values = Sequence[int] | Sequence[float] | npt.NDArray[Any]


class _Buffer:
    """A host buffer with its image on the device, filled from the beginning; on the CPU they are one."""

    def __init__(self, nbytes: int, device: torch.device, image: Tensor | None) -> None:
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.image = self.host
        if device.type != "cpu":
            self.image = torch.empty(nbytes, dtype=torch.uint8, device=device) if image is None else image
        self._bytes = self.host.numpy()
        self.num_kept = self.num_used = 0

    def put(self, values: Values, dtype: torch.dtype) -> Tensor | None:
        """See Flight.put; None if there is no room."""
        begin = self.num_used
        end = begin + len(values) * dtype.itemsize
        if end > len(self._bytes):
            return None
        self._bytes[begin:end].view(_NUMPY_TYPES[dtype])[:] = values
        self.num_used = end + -end % _ALIGNMENT
        return self.image[begin:end].view(dtype)

    def send(self) -> None:
        """Copy what was put behind what is kept to the device."""
        begin, end = self.num_kept, min(self.num_used, len(self._bytes))
        if self.image is not self.host and begin < end:
            self.image[begin:end].copy_(self.host[begin:end], non_blocking=True)


class Flight:
    """The buffers of one step that is under way, on the stream it was made under; see Flights."""

    def __init__(self, device: torch.device, nbytes: int, image: Tensor | None, num_results: int) -> None:
        self._device = device
        self._buffer = _Buffer(nbytes, device, image)
        self._overflow: list[_Buffer] = []
        self._results = torch.empty(num_results, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._landed = self._results[:0]
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def reset(self) -> None:
        """Begin another step."""
        self.keep(0)
        self._overflow.clear()

    def keep(self, nbytes: int) -> None:
        """Leave the beginning of the device buffer as the last flight left it, and put behind it."""
        self._buffer.num_kept = self._buffer.num_used = nbytes

    @property
    def num_put(self) -> int:
        """Bytes of the device buffer that are in use so far."""
        return self._buffer.num_used

    def put(self, values: Values, dtype: torch.dtype = torch.int64) -> Tensor:
        """Add host values, int32, int64 or float32.

        Returns: the 1-d device tensor that holds them once `send` was called. The same lengths put in the
            same order are at the same place in every step, unless they overflow the buffer.
        """
        for buffer in (self._buffer, *self._overflow):
            view = buffer.put(values, dtype)
            if view is not None:
                return view
        nbytes = max(self._buffer.host.shape[0], len(values) * dtype.itemsize)
        self._overflow.append(_Buffer(nbytes, self._device, None))
        return self.put(values, dtype)

    def send(self) -> None:
        """Copy everything that was put to the device, without waiting."""
        for buffer in (self._buffer, *self._overflow):
            buffer.send()

    def bring_back(self, results: Tensor) -> None:
        """Copy a step's results, 1-d int64, to the host without waiting; the last of its device work."""
        if results.shape[0] > self._results.shape[0]:
            self._results = torch.empty(results.shape[0], dtype=torch.int64, pin_memory=self._event is not None)
        if results.shape != self._landed.shape:
            self._landed = self._results[: results.shape[0]]
        self._landed.copy_(results, non_blocking=True)
        if self._event is not None:
            self._event.record(self._stream)

    def results(self) -> npt.NDArray[np.int64]:
        """What `bring_back` brought, until the flight begins again; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._landed.numpy()


class Flights:
    """Flights to use again and again: no step allocates unless more are under way than ever before."""

    def __init__(self, device: torch.device, nbytes: int, num_results: int) -> None:
        """Args: nbytes: that a step usually uploads at most. num_results: that it brings back."""
        self._device = device
        self._nbytes = nbytes
        self._image = None if device.type == "cpu" else torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._num_results = num_results
        self._free: list[Flight] = []

    def begin(self) -> Flight:
        """A flight for one step; it is the caller's until given back."""
        if not self._free:
            return Flight(self._device, self._nbytes, self._image, self._num_results)
        flight = self._free.pop()
        flight.reset()
        return flight

    def give_back(self, flight: Flight) -> None:
        """Take back the flight of a step that has settled."""
        self._free.append(flight)
