"""Loads from one other node over NIXL."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from connectors.nixl.agent import NixlAgent, NixlFailed
from connectors.nixl.blocks import NixlBlocks
from connectors.nixl.peer import Greeting, NixlPeer, PeerRefused
from connectors.nixl.pulling import Pull
from connectors.nixl.session import NixlSession
from connectors.peer.address import PeerAddress
from connectors.peer.link import PeerLink
from connectors.peer.loading import Cancelled, Loading
from connectors.peer.signs import SignsOfLife
from connectors.waiting import Stopped, Waiting

logger = logging.getLogger(__name__)

MAX_UNSAFE = 3
"""Sessions with a node whose memory can not be given back."""


class NixlLink(PeerLink):
    """The node is greeted with the first load, and again after a read has failed."""

    errors = (PeerRefused, NixlFailed, TimeoutError)

    def __init__(
        self,
        address: PeerAddress,
        engine_id: str,
        agent: NixlAgent,
        blocks: NixlBlocks,
        clock: Callable[[], float],
        *,
        num_threads: int,
        staging_nbytes: int,
        peer_timeout_s: float,
    ) -> None:
        """Args: staging_nbytes: memory for what comes from this node."""
        self._peer = NixlPeer(address, engine_id)
        signs = SignsOfLife(
            _Signs(self._peer), clock, name="outrider-nixl-signs", period_s=peer_timeout_s / 3, hold_s=peer_timeout_s
        )
        super().__init__(address, signs, clock, name="outrider-nixl-load", num_threads=num_threads)
        self._agent = agent
        self._blocks = blocks
        self._num_threads = num_threads
        self._staging_nbytes = staging_nbytes
        self._session: NixlSession | None = None  # the agent's thread's, as is the next one
        self._num_unsafe = 0

    def fetch(self, loading: Loading) -> None:
        """See PeerLink."""
        waiting = Waiting(self._clock, loading.load.until_s)
        loading.use(waiting)
        try:
            Pull(self._open_session(waiting), self._peer, loading, self._blocks, waiting).run()
        except Stopped:
            raise Cancelled from None
        finally:
            loading.use(None)

    def _open_session(self, waiting: Waiting) -> NixlSession:
        session = waiting.result(self._agent.submit(lambda _: self._session))
        if session is not None and not session.is_broken:
            return session
        greeting = self._peer.greet(waiting)
        return waiting.result(self._agent.submit(lambda nixl: self._greeted(nixl, greeting)))

    def _greeted(self, nixl: Any, greeting: Greeting) -> NixlSession:
        """The session that another load has made meanwhile, or a new one."""
        if self._session is not None and self._session.is_broken:
            self._session.close(nixl)
            if not self._session.is_closed:
                raise NixlFailed("other reads from this node have not ended yet")
            self._num_unsafe += self._session.is_unsafe
            self._session = None
        if self._num_unsafe > MAX_UNSAFE:
            raise NixlFailed("reads from this node have failed too often in ways that cost memory; it is left alone")
        if self._session is None:
            self._session = NixlSession(
                self._agent,
                nixl,
                self._blocks,
                greeting,
                num_lanes=2 * self._num_threads,  # one to be read to, one to be checked
                staging_nbytes=self._staging_nbytes,
            )
        return self._session

    def free(self) -> None:
        """See PeerLink."""
        self._agent.submit(self._close_session)
        self._peer.close()

    def _close_session(self, nixl: Any) -> None:
        if self._session is not None:
            self._session.close(nixl)
            self._session = None


class _Signs:
    """Implements SignSender."""

    def __init__(self, peer: NixlPeer) -> None:
        self._peer = peer

    def send(self, kept: Sequence[str], released: Sequence[str]) -> None:
        try:
            self._peer.keep(kept, released)
        except PeerRefused as error:
            logger.debug("no sign of life: %s", error)

    def close(self) -> None:
        self._peer.close()
