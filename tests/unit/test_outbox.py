"""The outbox: which outputs wait for those of the next steps, and for how long at most."""

import pytest

from server.engine.outbox import MIN_SEQUENCES, Outbox
from server.engine.protocol import FinishReason
from server.scheduler.outputs import Failure, SequenceOutput
from tests.fakes.core import Clock, make_request

REQUEST = make_request("a", range(3))
PATIENCE_S = 0.03


def token(number: int = 0) -> SequenceOutput:
    return SequenceOutput(REQUEST, 0, 0.0, 0.0, token_ids=(number,))


def batch_sizes(step_s: float, num_steps: int, *, patience_s: float = PATIENCE_S, num_running: int = 8) -> list[int]:
    """Of outputs that leave together, where each step brings one."""
    clock = Clock()
    outbox, sizes = Outbox(patience_s, clock), []
    for number in range(num_steps):
        clock.now_s += step_s
        outbox.put([token(number)], num_running)
        sizes.append(len(outbox.take_due()))
    return [size for size in sizes if size]


@pytest.mark.parametrize(
    ("step_s", "expected"), [(0.0055, 6), (0.0125, 3), (0.016, 2), (0.029, 2), (0.031, 1), (1.0, 1)]
)
def test_outputs_of_steps_that_fit_into_the_patience_leave_together(step_s: float, expected: int) -> None:
    assert batch_sizes(step_s, 6 * expected) == [expected] * 6


@pytest.mark.parametrize("settings", [{"patience_s": 0}, {"num_running": MIN_SEQUENCES - 1}])
@pytest.mark.parametrize("step_s", [0.0, 0.001])
def test_nothing_waits_without_patience_or_with_few_sequences(settings: dict[str, int], step_s: float) -> None:
    assert batch_sizes(step_s, 5, **settings) == [1] * 5


@pytest.mark.parametrize(
    "urgent",
    [
        token()._replace(is_first=True),
        token()._replace(finish_reason=FinishReason.LENGTH),
        token()._replace(token_ids=(), failure=Failure.BROKEN),
        token()._replace(token_ids=()),  # it was started
    ],
    ids=["first token", "end", "failure", "start"],
)
def test_news_take_along_what_waits_in_order(urgent: SequenceOutput) -> None:
    outbox = Outbox(PATIENCE_S, Clock())
    outbox.put([token(1)], MIN_SEQUENCES)
    assert outbox.take_due() == []
    outbox.put([token(2), urgent, token(3)], MIN_SEQUENCES)
    assert outbox.take_due() == [token(1), token(2), urgent, token(3)]
    assert outbox.take_all() == []


def test_nothing_waits_for_a_step_of_another_kind() -> None:
    outbox = Outbox(PATIENCE_S, Clock())
    outbox.put([token(1)], MIN_SEQUENCES)
    outbox.make_due()
    assert outbox.take_due() == [token(1)]
    outbox.put([token(2)], MIN_SEQUENCES)
    assert outbox.take_due() == []
    assert outbox.take_all() == [token(2)]
