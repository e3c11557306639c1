"""One node that reads blocks from this one: its connection, from greeting to end."""

import logging
from collections.abc import Callable
from itertools import islice

from connectors.peer.leases import LeaseLost, LeaseTable
from connectors.rare_log import RareLog
from connectors.tcp.blocks import LocalBlocks
from connectors.tcp.connection import Connection
from connectors.tcp.messages import (
    PROTOCOL_VERSION,
    Data,
    Failed,
    Hello,
    Keep,
    Message,
    ProtocolError,
    Pull,
    Refused,
    Release,
    Welcome,
    pack,
)
from connectors.tcp.parts import slots
from connectors.wire import checksum

logger = logging.getLogger(__name__)

IDLE_S = 120.0
"""A connection that nobody says anything on for so long is closed."""


class Serving:
    """Answers on one connection; used by one thread."""

    def __init__(
        self,
        connection: Connection,
        engine_id: str,
        blocks: LocalBlocks,
        leases: LeaseTable,
        clock: Callable[[], float],
        *,
        timeout_s: float,
        log: RareLog,
    ) -> None:
        """Args: timeout_s: for a message to arrive once it has begun, and for a chunk to leave."""
        self._connection = connection
        self._engine_id = engine_id
        self._blocks = blocks
        self._leases = leases
        self._clock = clock
        self._timeout_s = timeout_s
        self._log = log

    def run(self) -> None:
        """Answer until the other side is gone, is silent for long, or says what it must not."""
        try:
            if self._greet():
                while True:
                    self._answer(self._connection.receive_next(idle_s=IDLE_S, timeout_s=self._timeout_s))
        except ProtocolError as error:
            self._log.warning("protocol", "a connection for KV is closed: %s", error)
        except OSError as error:
            logger.debug("a connection for KV has ended: %s", error)
        finally:
            self._connection.close()

    def _send(self, *messages: Message) -> None:
        self._connection.send(*messages, until_s=self._clock() + self._timeout_s)

    def _greet(self) -> bool:
        hello = self._connection.receive(until_s=self._clock() + self._timeout_s)
        if not isinstance(hello, Hello):
            raise ProtocolError(f"it begins with {hello.kind.name}")
        if hello.version != PROTOCOL_VERSION:
            reason = f"protocol version {hello.version} was asked for, this node has {PROTOCOL_VERSION}"
        elif hello.engine_id != self._engine_id:
            reason = f"engine {hello.engine_id} was asked for, this one is {self._engine_id}"
        else:
            self._send(Welcome(self._blocks.layout))
            return True
        self._send(Refused(reason))
        return False

    def _answer(self, message: Message) -> None:
        match message:
            case Release(lease_ids):
                for lease_id in lease_ids:
                    self._leases.end(lease_id)
            case Keep(lease_ids):
                for lease_id in lease_ids:
                    self._leases.renew(lease_id)
            case Pull():
                try:
                    with self._leases.reading(message.lease_id, self._connection.stop) as leased:
                        self._send_blocks(message, leased.block_ids, leased.hashes)
                except LeaseLost as error:
                    self._send(Failed(str(error)))
            case _:
                raise ProtocolError(f"{message.kind.name} comes out of turn")

    def _send_blocks(self, pull: Pull, block_ids: tuple[int, ...], hashes: tuple[bytes, ...]) -> None:
        end = pull.first + pull.count
        if end > len(block_ids):
            return self._send(Failed(f"blocks up to {end} are wanted, the lease has {len(block_ids)}"))
        if pull.last_hash and hashes[end - 1] != pull.last_hash:
            return self._send(Failed(f"block {end - 1} of the lease holds other tokens than those that are wanted"))
        groups = [index for index in range(len(self._blocks.layout.groups)) if pull.groups >> index & 1]
        if not groups or pull.groups >> len(self._blocks.layout.groups):
            return self._send(Failed("groups that this node does not have"))
        order = slots(self._blocks.layout, groups)
        segments = ((group, block_id, part) for block_id in block_ids[pull.first : end] for group, part in order)
        num_segments = self._blocks.num_segments(groups)
        while chunk := list(islice(segments, num_segments)):
            with self._blocks.reading(chunk) as views:
                sums = tuple(None if view is None else checksum(view) for view in views)
                header = pack(Data(sums))
                self._connection.send_buffers(
                    [header, *(view for view in views if view is not None)], until_s=self._clock() + self._timeout_s
                )
        return None
