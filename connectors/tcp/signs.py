"""Signs of life over a connection of their own."""

import logging
from collections.abc import Callable, Sequence

from connectors.peer.address import PeerAddress
from connectors.tcp.connection import Connection
from connectors.tcp.messages import Hello, Keep, ProtocolError, Release, Welcome, leases_in_messages

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 1.0


class TcpSigns:
    """Connects when there is something to say; see SignSender."""

    def __init__(self, address: PeerAddress, engine_id: str, clock: Callable[[], float]) -> None:
        self._address = address
        self._engine_id = engine_id
        self._clock = clock
        self._connection: Connection | None = None

    def send(self, kept: Sequence[str], released: Sequence[str]) -> None:
        """Once more on a new connection if the old one turns out to be lost."""
        messages = leases_in_messages(released, Release) + leases_in_messages(kept, Keep)
        was_open = self._connection is not None
        if not self._sent(messages) and was_open:
            self._sent(messages)

    def _sent(self, messages: bytes) -> bool:
        try:
            connection = self._connection or self._connect()
            connection.send_buffers([messages], until_s=self._clock() + SEND_TIMEOUT_S)
        except (OSError, ProtocolError) as error:
            logger.debug("no sign of life to %s: %s", self._address, error)
            self.close()
            return False
        return True

    def _connect(self) -> Connection:
        """Raises: OSError, ProtocolError."""
        until_s = self._clock() + SEND_TIMEOUT_S
        self._connection = Connection.open(self._address, self._clock, SEND_TIMEOUT_S)
        self._connection.send(Hello(self._engine_id), until_s=until_s)
        answer = self._connection.receive(until_s=until_s)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the answer to a greeting is {answer}")
        return self._connection

    def close(self) -> None:
        """End the connection; another one follows if there is more to say."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
