"""Which decode node has the KV of a whole prompt, as far as its client can know."""

import time
from collections import OrderedDict
from collections.abc import Callable

from clients.nodes import Node

MAX_PROMPTS = 1024
MAX_AGE_S = 60.0
"""Later the KV may well be gone: blocks that nobody asked for make way for others."""


class RecentPrompts:
    """Remembers where prompts went last; lives on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nodes: OrderedDict[bytes, tuple[Node, float]] = OrderedDict()

    def remember(self, identity: bytes, node: Node) -> None:
        """A request with this prompt has ended there."""
        self._nodes[identity] = node, self._clock()
        self._nodes.move_to_end(identity)
        if len(self._nodes) > MAX_PROMPTS:
            self._nodes.popitem(last=False)

    def find(self, identity: bytes) -> Node | None:
        """Where that was lately; None if nowhere."""
        node, ended_s = self._nodes.get(identity, (None, 0.0))
        return node if self._clock() - ended_s <= MAX_AGE_S else None
