"""All that goes on with one other node: loads, the connections they come over, and signs of life."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from connectors.peer_address import PeerAddress
from connectors.rare_log import RareLog
from connectors.tcp_blocks import LocalBlocks
from connectors.tcp_loading import Cancelled, Loading
from connectors.tcp_messages import ProtocolError
from connectors.tcp_pulling import pull_blocks
from connectors.tcp_session import PeerRefused, PullFailed, Session
from connectors.tcp_signs import SignsOfLife
from connectors.threads import Threads

logger = logging.getLogger(__name__)


class TcpLink:
    """One for each start of another node, so that one that hangs keeps no other waiting.

    Connections that are not in use are kept for the next load.
    """

    def __init__(
        self,
        address: PeerAddress,
        engine_id: str,
        blocks: LocalBlocks,
        clock: Callable[[], float],
        *,
        num_threads: int,
        peer_timeout_s: float,
    ) -> None:
        """Args: num_threads: loads at a time."""
        self._address = address
        self._engine_id = engine_id
        self._blocks = blocks
        self._clock = clock
        self._signs = SignsOfLife(address, engine_id, clock, period_s=peer_timeout_s / 3, hold_s=peer_timeout_s)
        self._threads = Threads("outrider-tcp-load", num_threads)
        self._log = RareLog(logger, clock)
        self._lock = threading.Lock()
        self._loadings: dict[int, Loading] = {}
        self._sessions: list[Session] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is lost by closing it."""
        with self._lock:
            return not self._loadings and self._signs.is_idle

    def hold(self, lease_id: str) -> None:
        """See PeerTransport.hold."""
        self._signs.hold(lease_id)

    def release(self, lease_id: str) -> None:
        """See PeerTransport.release."""
        self._signs.release(lease_id)

    def load(self, loading: Loading) -> None:
        """Begin it as soon as a thread is free."""
        with self._lock:
            self._loadings[loading.load.seq_id] = loading
        self._signs.use(loading.load.source.lease_id)
        self._threads.submit(partial(self._run, loading))

    def cancel(self, seq_id: int) -> None:
        """End a load soon, if it is one of these."""
        with self._lock:
            loading = self._loadings.get(seq_id)
        if loading is not None and loading.cancel():
            self._end(loading)

    def _run(self, loading: Loading) -> None:
        if not loading.begin():
            return
        try:
            self._fetch(loading)
        except Cancelled:
            pass
        except (OSError, ProtocolError, PeerRefused, PullFailed) as error:
            if not loading.is_cancelled:
                self._log.warning(
                    type(error).__name__,
                    "%d of %d blocks did not come from %s: %s",
                    len(loading.load.block_ids) - loading.num_done,
                    len(loading.load.block_ids),
                    self._address,
                    error,
                )
        finally:
            self._end(loading)

    def _fetch(self, loading: Loading) -> None:
        """Once more on a new connection where one was lost: the node may have closed those that were idle."""
        for is_last in (False, True):
            session = self._session(loading, is_fresh=is_last)
            try:
                pull_blocks(session, loading, self._blocks)
            except PullFailed:
                self._keep(session, loading)
                raise
            except ConnectionError:
                session.connection.close()
                if is_last or loading.is_cancelled:
                    raise
            except BaseException:
                session.connection.close()
                raise
            else:
                self._keep(session, loading)
                return

    def _session(self, loading: Loading, *, is_fresh: bool) -> Session:
        with self._lock:
            session = self._sessions.pop() if self._sessions and not is_fresh else None
        if session is not None:
            try:
                loading.use(session.connection)
            except Cancelled:
                self._keep(session, loading)
                raise
            return session
        return Session.open(
            self._address,
            self._engine_id,
            self._blocks.layout,
            self._clock,
            until_s=loading.load.until_s,
            opened=loading.use,
        )

    def _keep(self, session: Session, loading: Loading) -> None:
        loading.use(None)
        with self._lock:
            self._sessions.append(session)

    def _end(self, loading: Loading) -> None:
        with self._lock:
            self._loadings.pop(loading.load.seq_id, None)
        self._signs.leave(loading.load.source.lease_id)
        loading.end()

    def stop(self) -> None:
        """Cancel all loads."""
        with self._lock:
            loadings = list(self._loadings)
        for seq_id in loadings:
            self.cancel(seq_id)

    def close(self, timeout_s: float) -> None:
        """Cancel all loads, tell the other node, and end all threads."""
        until_s = time.monotonic() + timeout_s
        self.stop()
        self._threads.end(timeout_s)
        signs = self._signs.close()
        if signs is not None:
            signs.join(max(0.0, until_s - time.monotonic()))
        with self._lock:
            sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.connection.close()
