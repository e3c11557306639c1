"""Leases between nodes, by whichever way they read each other."""

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.fakes.core import Clock
from tests.fakes.kv_node import KVNode, ask_until_renewed
from tests.fakes.thread_watch import no_thread_is_left

WAYS: dict[str, dict[str, Any]] = {
    "tcp": {"connector": "tcp", "transfer_timeout_seconds": 20.0},
    "nixl": {"connector": "nixl", "transports": "tcp"},
}
NEEDS_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")


@pytest.fixture
def nodes() -> Iterator[ExitStack]:
    """Closes what is entered; no thread is left."""
    with no_thread_is_left(), ExitStack() as stack:
        yield stack


def node(stack: ExitStack, **settings: Any) -> KVNode:
    """A node until the end of the test."""
    made = KVNode(**settings)
    stack.callback(made.close)
    return made


@pytest.mark.parametrize("way", ["tcp", pytest.param("nixl", marks=NEEDS_NIXL)])
def test_an_expired_lease_behind_a_renewed_one(nodes: ExitStack, way: str) -> None:
    clock = Clock()
    holder = node(nodes, **WAYS[way], engine_id="holder", lease_seconds=2.5, clock=clock)
    reader = node(nodes, **WAYS[way], engine_id="reader", peer_timeout_seconds=0.3)
    holder.fill()
    renewed, expired = holder.hand_on(1, 2), holder.hand_on(3, 4)
    request = reader.request(2, source=renewed)
    for _ in range(3):  # seconds in which the reader has no blocks for it
        clock.now_s += 1.0
        ask_until_renewed(reader, request)
    holder.wait_for_release(expired)
    assert renewed.lease_id not in holder.ended.released
    assert reader.wait_for_load(reader.begin(expired, 4, 5)) == {4, 5}
    assert reader.matched(request) == 2
    assert reader.wait_for_load(reader.order(request, (6, 7))) == frozenset()
    assert torch.equal(reader.blocks[[6, 7]], holder.blocks[[1, 2]])
    holder.wait_for_release(renewed)
