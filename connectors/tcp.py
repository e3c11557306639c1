"""KV from node to node over TCP, without any other package."""

import threading
import time
from collections.abc import Callable

from pydantic import Field

from connectors.base import Connector, ConnectorContext, KVCaches
from connectors.peer import PeerScheduler, PeerWorker
from connectors.peer_address import AllowedPeers, PeerAddress
from connectors.peer_config import PeerConfig
from connectors.peer_leases import LeaseTable
from connectors.peer_transport import LoadOutcome, PeerLoad
from connectors.tcp_blocks import LocalBlocks
from connectors.tcp_link import TcpLink
from connectors.tcp_loading import Loading
from connectors.tcp_server import TcpServer
from server.kv_handle import KVHandle

MAX_LINKS = 64
"""Nodes that are talked to at a time."""


class TcpConfig(PeerConfig):
    """Settings of KV over TCP."""

    host: str = Field(
        default="127.0.0.1",
        description="address to serve KV at; whoever reaches it may connect, so choose one of a network of your own",
    )
    port: int = Field(default=0, ge=0, le=65535, description="to serve KV at; 0 for any that is free")
    advertised_host: str | None = Field(
        default=None, description="what other nodes are told instead of host; needed where that is 0.0.0.0 or ::"
    )
    num_threads: int = Field(default=4, ge=1, le=64, description="loads at a time from one other node")

    def build(self, context: ConnectorContext) -> Connector:
        """Both halves. Raises: ConfigError if the address can not be had."""
        leases = LeaseTable(
            lease_s=self.lease_seconds,
            peer_timeout_s=self.peer_timeout_seconds,
            clock=context.clock,
            notify=context.notify,
        )
        transport = TcpTransport(self, context)
        return Connector(
            PeerScheduler(transport, leases, context, transfer_timeout_s=self.transfer_timeout_seconds),
            PeerWorker(transport, leases, context, sweep_period_s=min(0.25, self.peer_timeout_seconds / 10)),
        )


class TcpTransport:
    """A server for those who read from here, and a link to each node that is read from; see PeerTransport."""

    def __init__(self, config: TcpConfig, context: ConnectorContext) -> None:
        self._config = config
        self._clock = context.clock
        self._allowed = AllowedPeers(config.allowed_peers)
        self._server: TcpServer | None = None
        if context.is_producer:
            self._server = TcpServer(
                config.host,
                config.port,
                advertised_host=config.advertised_host,
                engine_id=context.engine_id,
                clock=context.clock,
                timeout_s=config.transfer_timeout_seconds,
            )
        self._blocks: LocalBlocks | None = None
        self._links: dict[tuple[str, str], TcpLink] = {}
        self._link_of_load: dict[int, TcpLink] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """host:port; empty on a node that KV may not leave."""
        return "" if self._server is None else self._server.address

    def refusal(self, source: KVHandle) -> str | None:
        """Why its address is of no use."""
        try:
            address = PeerAddress.parse(source.address)
        except ValueError as error:
            return f"address of its KV: {error}"
        return None if self._allowed.allow(address) else f"allowed_peers does not have {address}, where its KV is"

    def start(self, caches: KVCaches, leases: LeaseTable) -> None:
        """Open for others."""
        self._blocks = LocalBlocks(caches)
        if self._server is not None:
            self._server.start(self._blocks, leases)

    def mark(self) -> None:
        """See PeerTransport."""
        assert self._blocks is not None
        self._blocks.mark()

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
        """See PeerTransport."""
        with self._lock:
            link = self._link_of_load.get(seq_id)
        if link is not None:
            link.cancel(seq_id)

    def hold(self, source: KVHandle) -> None:
        """See PeerTransport."""
        link = self._link(source)
        if link is not None:
            link.hold(source.lease_id)

    def release(self, source: KVHandle) -> None:
        """See PeerTransport."""
        link = self._link(source)
        if link is not None:
            link.release(source.lease_id)

    def _link(self, source: KVHandle) -> TcpLink | None:
        """The link to a handle's node; only the step thread's. None if there are too many others in use."""
        key = (source.address, source.engine_id)
        link = self._links.pop(key, None)
        if link is None:
            assert self._blocks is not None
            if len(self._links) >= MAX_LINKS and not self._close_idle_link():
                return None
            link = TcpLink(
                PeerAddress.parse(source.address),
                source.engine_id,
                self._blocks,
                self._clock,
                num_threads=self._config.num_threads,
                peer_timeout_s=self._config.peer_timeout_seconds,
            )
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
        if self._server is not None:
            self._server.close(max(0.0, until_s - time.monotonic()))
