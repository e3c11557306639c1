"""Captured segments: the device's part of a decoding step without its hundreds of launches.

A step is two graphs, the target's forward pass and what follows it, because not every step's second
segment can be captured (docs/adr/0006-two-captured-segments.md). All graphs share one memory pool:
they run one after the other, and what one leaves behind is read before the next one starts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from server.worker.buckets import Bucket
from server.worker.results import StepOutputs

_Output = TypeVar("_Output")


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    """The graphs of one bucket, and what their replay fills; the second may be missing."""

    first: torch.cuda.CUDAGraph
    hidden: Tensor
    second: torch.cuda.CUDAGraph | None
    outputs: StepOutputs | None


class StepGraphs:
    """The captured steps by bucket; owned by the runner."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._steps: dict[Bucket, _CapturedStep] = {}

    def capture(
        self, bucket: Bucket, first: Callable[[], Tensor], second: Callable[[Tensor], StepOutputs] | None
    ) -> None:
        """Capture a bucket's segments; larger buckets come first, so that smaller ones find memory in the pool.

        Args: first: -> [T, hidden]. second: what follows. Both read and write only what stays at its place.
        """
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):  # once outside: kernels are compiled, libraries set up
            hidden = first()
            if second is not None:
                second(hidden)
        first_graph, hidden = self._captured(first)
        second_graph, outputs = (None, None) if second is None else self._captured(partial(second, hidden))
        self._steps[bucket] = _CapturedStep(first_graph, hidden, second_graph, outputs)

    def replay_first(self, bucket: Bucket) -> Tensor:
        """Run the target's forward pass. Returns: [T, hidden], until the next replay."""
        step = self._steps[bucket]
        step.first.replay()
        return step.hidden

    def replay_second(self, bucket: Bucket) -> StepOutputs:
        """Run what follows the first segment. Returns: its outputs, until the next replay."""
        step = self._steps[bucket]
        assert step.second is not None
        assert step.outputs is not None
        step.second.replay()
        return step.outputs

    def _captured(self, segment: Callable[[], _Output]) -> tuple[torch.cuda.CUDAGraph, _Output]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = segment()
        return graph, output
