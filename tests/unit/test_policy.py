"""Who goes first does not depend on when one asks."""

from server.scheduler.policy import order_key
from tests.fakes.core import make_request


def test_fcfs_looks_at_arrival_alone() -> None:
    urgent = make_request("urgent", range(3), priority=-9, arrival_s=2.0)
    early = make_request("early", range(3), priority=9, arrival_s=1.0)
    assert order_key(early, "fcfs", 10.0) < order_key(urgent, "fcfs", 10.0)


def test_lower_priority_goes_first_until_the_other_has_aged() -> None:
    old = make_request("old", range(3), priority=2, arrival_s=0.0)
    for arrival_s, is_first in ((19.0, True), (21.0, False)):
        urgent = make_request("urgent", range(3), priority=0, arrival_s=arrival_s)
        assert (order_key(urgent, "priority", 10.0) < order_key(old, "priority", 10.0)) is is_first


def test_equal_priority_is_fcfs() -> None:
    first, second = (make_request("x", range(3), priority=5, arrival_s=arrival_s) for arrival_s in (1.0, 1.1))
    assert order_key(first, "priority", 10.0) < order_key(second, "priority", 10.0)
