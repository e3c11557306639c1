"""Captured segments: the device's part of a decoding step without its hundreds of launches.

A step is two graphs, the target's forward pass and what follows it, because not every step's second
segment can be captured (docs/adr/0006-two-captured-segments.md). All graphs share one memory pool:
they run one after the other, and what one leaves behind is read before the next one starts.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from server.worker.buckets import Bucket
from server.worker.results import StepOutputs
from server.worker.target import TargetOutputs

_Output = TypeVar("_Output")


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    """The graphs of one bucket, and what their replay fills; the second ones by whether they draft, or none."""

    first: torch.cuda.CUDAGraph
    target: TargetOutputs
    seconds: Mapping[bool, tuple[torch.cuda.CUDAGraph, StepOutputs]]


class StepGraphs:
    """The captured steps by bucket; owned by the runner."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._steps: dict[Bucket, _CapturedStep] = {}

    def capture(
        self,
        bucket: Bucket,
        first: Callable[[], TargetOutputs],
        seconds: Mapping[bool, Callable[[TargetOutputs], StepOutputs]],
    ) -> None:
        """Capture a bucket's segments; larger buckets come first, so that smaller ones find memory in the pool.

        Args: seconds: what may follow, by whether it drafts. All read and write only what stays at its place.
        """
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):  # once outside: kernels are compiled, libraries set up
            target = first()
            for second in seconds.values():
                second(target)
        first_graph, target = self._captured(first)
        captured = {drafts: self._captured(partial(second, target)) for drafts, second in seconds.items()}
        self._steps[bucket] = _CapturedStep(first_graph, target, captured)

    def replay_first(self, bucket: Bucket) -> TargetOutputs:
        """Run the target's forward pass. Returns: what it made, until the next replay."""
        step = self._steps[bucket]
        step.first.replay()
        return step.target

    def replay_second(self, bucket: Bucket, *, drafts: bool) -> StepOutputs:
        """Run what follows the first segment; one that drafts anyway where there is no other.

        Returns: its outputs, until the next replay.
        """
        seconds = self._steps[bucket].seconds
        graph, outputs = seconds[drafts] if drafts in seconds else seconds[not drafts]
        graph.replay()
        return outputs

    def _captured(self, segment: Callable[[], _Output]) -> tuple[torch.cuda.CUDAGraph, _Output]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device meanwhile.
        with (
            _collecting_nothing(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            output = segment()
        return graph, output


@contextmanager
def _collecting_nothing() -> Iterator[None]:
    """Keep the garbage: among it may be graphs of an earlier engine, and freeing one breaks the capture of another."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
