"""Requests whose KV is where this node does not read, or is of another model or form than its own."""

import logging
from collections.abc import Callable, Collection

from connectors.rare_log import RareLog
from server.request import Request
from server.scheduler.statistics import Counters

logger = logging.getLogger(__name__)


class UnreadableHandles:
    """Tells of them: two nodes have different connectors or models, and prompts are computed twice."""

    def __init__(
        self, reads_from: Collection[str], fingerprint: str, clock: Callable[[], float], counters: Counters
    ) -> None:
        """Args: reads_from: names of the connectors by which KV comes here. fingerprint: of this node's KV."""
        self._reads_from = reads_from
        self._fingerprint = fingerprint
        self._counters = counters
        self._log = RareLog(logger, clock)

    def check(self, request: Request) -> None:
        """Count a request whose handle names another connector, or KV that does not fit, which its connector tells of.

        Of the former there is a line a minute for each node that holds such KV.
        """
        source = None if request.continuation is None else request.continuation.source
        if source is None:
            return
        if source.connector in self._reads_from:
            self._counters.num_unreadable_handles += source.fingerprint != self._fingerprint
            return
        self._counters.num_unreadable_handles += 1
        kind = f"{source.connector} {source.engine_id}"
        self._log.warning(
            kind,
            "request %s: its KV is held by connector %.64s of engine %.64s, and this node reads from %s: "
            "what its cache lacks is computed here",
            request.request_id,
            source.connector,
            source.engine_id,
            ", ".join(sorted(self._reads_from)) or "none",
        )
