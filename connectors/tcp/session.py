"""A connection to a node that has been greeted, and the blocks that come over it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

from connectors.peer.address import PeerAddress
from connectors.peer.layout import NodeLayout, mismatch, shared_groups
from connectors.tcp.connection import Connection
from connectors.tcp.messages import (
    PROTOCOL_VERSION,
    Data,
    Failed,
    Hello,
    Message,
    ProtocolError,
    Pull,
    Refused,
    Welcome,
)
from connectors.tcp.parts import Segment, Slot, slots
from connectors.wire import checksum

CONNECT_TIMEOUT_S = 2.0

Write: TypeAlias = Callable[[Sequence[Segment]], AbstractContextManager[Sequence[memoryview]]]
"""Buffers for segments, whose content is where it belongs once the context was left."""
Came: TypeAlias = Callable[[int, frozenset[int], frozenset[int]], None]
"""So many leading blocks have come by now; these places are bad, and these lack a group."""


class PeerRefused(Exception):
    """The node is not the one that was meant, or its blocks do not fit."""


class PullFailed(Exception):
    """The node does not have these blocks, or no longer; the connection is as good as before."""


class Session:
    """Used by one thread at a time.

    Attributes: groups: places of the groups that are exchanged, here and there, in the order of the latter.
    """

    def __init__(self, connection: Connection, theirs: NodeLayout, groups: Sequence[tuple[int, int]]) -> None:
        self.connection = connection
        self.theirs = theirs
        self.groups = groups
        own = {there: here for here, there in groups}
        self._slots: Sequence[Slot] = [(own[there], part) for there, part in slots(theirs, list(own))]

    @classmethod
    def open(
        cls,
        address: PeerAddress,
        engine_id: str,
        ours: NodeLayout,
        clock: Callable[[], float],
        *,
        until_s: float,
        opened: Callable[[Connection], None],
    ) -> "Session":
        """Connect and greet. Args: opened: told of the connection as soon as it is there; what it raises comes back.

        Raises: OSError, ProtocolError, PeerRefused.
        """
        timeout_s = min(CONNECT_TIMEOUT_S, until_s - clock())
        if timeout_s <= 0:
            raise TimeoutError("its time was up before it began")
        connection = Connection.open(address, clock, timeout_s)
        try:
            opened(connection)
            connection.send(Hello(engine_id), until_s=until_s)
            theirs = _layout(connection.receive(until_s=until_s))
            reason = mismatch(ours, theirs)
            if reason is not None:
                raise PeerRefused(reason)
        except BaseException:
            connection.close()
            raise
        return cls(connection, theirs, shared_groups(ours, theirs))

    def pull(self, pull: Pull, write: Write, came: Came, *, at_a_time: int, until_s: float) -> None:
        """Fetch blocks. Args: at_a_time: segments to have buffers for.

        Raises: OSError, ProtocolError, after which the connection is to be closed; PullFailed.
        """
        self.connection.send(pull, until_s=until_s)
        num_slots = len(self._slots)
        num_segments, num_done = pull.count * num_slots, 0
        while num_done < num_segments:
            message = self.connection.receive(until_s=until_s)
            if isinstance(message, Failed):
                raise PullFailed(message.reason)
            if not isinstance(message, Data) or len(message.checksums) > num_segments - num_done:
                raise ProtocolError(f"{message.kind.name} comes out of turn")
            segments = [self._segment(place) for place in range(num_done, num_done + len(message.checksums))]
            bad, lacking = self._receive(segments, message.checksums, write, at_a_time, until_s)
            num_done += len(segments)
            came(num_done // num_slots, bad, lacking)

    def _segment(self, place: int) -> Segment:
        """Args: place: among all segments of a pull."""
        block, slot = divmod(place, len(self._slots))
        group, part = self._slots[slot]
        return group, block, part

    def _receive(
        self,
        segments: Sequence[Segment],
        checksums: Sequence[int | None],
        write: Write,
        at_a_time: int,
        until_s: float,
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Take in what follows a Data message. Returns: places that are bad, and that lack a group."""
        coming = [(segment, sent) for segment, sent in zip(segments, checksums, strict=True) if sent is not None]
        absent = [segment for segment, sent in zip(segments, checksums, strict=True) if sent is None]
        bad = {place for group, place, _ in absent if group == self.groups[0][0]}
        for start in range(0, len(coming), at_a_time):
            part = coming[start : start + at_a_time]
            with write([segment for segment, _ in part]) as buffers:
                self.connection.receive_into(buffers, until_s=until_s)
                found = [checksum(buffer) for buffer in buffers]
            bad |= {place for ((_, place, _), sent), is_sum in zip(part, found, strict=True) if sent != is_sum}
        return frozenset(bad), frozenset(place for _, place, _ in absent)


def _layout(answer: Message) -> NodeLayout:
    if isinstance(answer, Refused):
        raise PeerRefused(answer.reason)
    if not isinstance(answer, Welcome):
        raise ProtocolError(f"{answer.kind.name} in answer to a greeting of version {PROTOCOL_VERSION}")
    return answer.layout
