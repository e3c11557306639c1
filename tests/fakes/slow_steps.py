"""A device that takes its time, so that a request is live for as long as a test needs, however busy the machine is."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from server.plan import StepPlan
from server.worker.results import StepHandle
from server.worker.runner import Runner

STEP_S = 0.05


@contextmanager
def slow_steps() -> Iterator[None]:
    """While the block runs, every step takes STEP_S at least."""
    launch = Runner.launch

    def launch_late(runner: Runner, plan: StepPlan) -> StepHandle:
        time.sleep(STEP_S)
        return launch(runner, plan)

    with patch.object(Runner, "launch", launch_late):
        yield
