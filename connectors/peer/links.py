"""The nodes that are talked to."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from connectors.peer.address import PeerAddress
from connectors.peer.link import PeerLink
from connectors.peer.loading import Loading
from connectors.peer.transport import LoadOutcome, PeerLoad
from server.kv_handle import KVHandle

MAX_LINKS = 64
"""Nodes that are talked to at a time."""

_Link = TypeVar("_Link", bound=PeerLink)


class PeerLinks(Generic[_Link]):
    """A link for each start of a node, made when it is first named. The methods are those of PeerTransport."""

    def __init__(self, make: Callable[[PeerAddress, str], _Link]) -> None:
        """Args: make: a link to an engine at an address."""
        self._make = make
        self._links: dict[tuple[str, str], _Link] = {}
        self._link_of_load: dict[int, _Link] = {}
        self._lock = threading.Lock()

    def load(self, load: PeerLoad, ended: Callable[[LoadOutcome], None]) -> None:
        """Begin it, unless too many nodes are talked to: then it has failed."""
        link = self._link(load.source)
        if link is None:
            ended(LoadOutcome(frozenset(load.block_ids)))
            return
        with self._lock:
            self._link_of_load[load.seq_id] = link

        def end(outcome: LoadOutcome) -> None:
            with self._lock:
                self._link_of_load.pop(load.seq_id, None)
            ended(outcome)

        link.load(Loading(load, end))

    def cancel(self, seq_id: int) -> None:
        """End a load soon."""
        with self._lock:
            link = self._link_of_load.get(seq_id)
        if link is not None:
            link.cancel(seq_id)

    def hold(self, source: KVHandle) -> None:
        """A load will follow."""
        link = self._link(source)
        if link is not None:
            link.hold(source.lease_id)

    def release(self, source: KVHandle) -> None:
        """No load will follow."""
        link = self._link(source)
        if link is not None:
            link.release(source.lease_id)

    def _link(self, source: KVHandle) -> _Link | None:
        """The link to a handle's node; only the step thread's. None if there are too many others in use."""
        key = (source.address, source.engine_id)
        link = self._links.pop(key, None)
        if link is None:
            if len(self._links) >= MAX_LINKS and not self._close_idle_link():
                return None
            link = self._make(PeerAddress.parse(source.address), source.engine_id)
        self._links[key] = link  # those used longest ago come first
        return link

    def _close_idle_link(self) -> bool:
        for key, link in self._links.items():
            if link.is_idle:
                del self._links[key]
                link.close(0.0)
                return True
        return False

    def close(self, timeout_s: float) -> None:
        """End all loads and threads; may be called twice."""
        until_s = time.monotonic() + timeout_s
        for link in self._links.values():
            link.stop()
        for link in self._links.values():
            link.close(max(0.0, until_s - time.monotonic()))
