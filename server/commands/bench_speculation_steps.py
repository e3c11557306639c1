"""The steps of a phase, as the engine tells of them."""

import asyncio
from collections.abc import Callable

from server.events import Event, StepFinished


class StepLog:
    """Keeps the steps in which a whole batch decoded.

    Called on the step thread; everything else on the event loop, before the batch is sent and once its steps are there.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._batch = self._wanted = 0
        self._steps: list[tuple[float, int]] = []
        self._notify: Callable[[], object] = lambda: None

    def expect(self, batch: int, num_steps: int) -> "asyncio.Future[None]":
        """Keep the next steps that bring at least a token for each of so many sequences.

        Returns: done once there are so many of them.
        """
        loop = asyncio.get_running_loop()
        reached: asyncio.Future[None] = loop.create_future()
        self._batch, self._wanted, self._steps = batch, num_steps, []
        self._notify = lambda: loop.call_soon_threadsafe(_finish, reached)
        return reached

    def __call__(self, event: Event) -> None:
        """Take in a step; other events are none of its business."""
        if not isinstance(event, StepFinished) or len(self._steps) >= self._wanted:
            return
        if event.num_rows == self._batch <= event.num_generated_tokens:
            self._steps.append((self._clock(), event.num_generated_tokens))
            if len(self._steps) == self._wanted:
                self._notify()

    def tokens_per_s(self, first: int) -> float:
        """Of the expected steps from the one of this index on."""
        tokens = sum(num_tokens for _, num_tokens in self._steps[first:])
        return tokens / (self._steps[-1][0] - self._steps[first - 1][0])


def _finish(reached: "asyncio.Future[None]") -> None:
    if not reached.done():  # nobody waits any more
        reached.set_result(None)
