"""All that goes on with one other node over TCP."""

from collections.abc import Callable

from connectors.peer.address import PeerAddress
from connectors.peer.link import PeerLink
from connectors.peer.loading import Cancelled, Loading
from connectors.peer.signs import SignsOfLife
from connectors.tcp.blocks import LocalBlocks
from connectors.tcp.messages import ProtocolError
from connectors.tcp.pulling import pull_blocks
from connectors.tcp.session import PeerRefused, PullFailed, Session
from connectors.tcp.signs import TcpSigns


class TcpLink(PeerLink):
    """Connections that are not in use are kept for the next load."""

    errors = (OSError, ProtocolError, PeerRefused, PullFailed)

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
        """Args: num_threads: loads at a time, each with a connection."""
        signs = SignsOfLife(
            TcpSigns(address, engine_id, clock),
            clock,
            name="outrider-tcp-signs",
            period_s=peer_timeout_s / 3,
            hold_s=peer_timeout_s,
        )
        super().__init__(address, signs, clock, name="outrider-tcp-load", num_threads=num_threads)
        self._engine_id = engine_id
        self._blocks = blocks
        self._sessions: list[Session] = []

    def fetch(self, loading: Loading) -> None:
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
        if session is None:
            return Session.open(
                self._address,
                self._engine_id,
                self._blocks.layout,
                self._clock,
                until_s=loading.load.until_s,
                opened=loading.use,
            )
        try:
            loading.use(session.connection)
        except Cancelled:
            session.connection.close()
            raise
        return session

    def _keep(self, session: Session, loading: Loading) -> None:
        loading.use(None)
        with self._lock:
            self._sessions.append(session)

    def free(self) -> None:
        """Close what is kept."""
        with self._lock:
            sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.connection.close()
