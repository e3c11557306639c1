"""KV from node to node over TCP, without any other package."""

import time

from pydantic import Field

from connectors.base import Connector, ConnectorContext, KVCaches
from connectors.peer.address import AllowedPeers, PeerAddress
from connectors.peer.config import PeerConfig
from connectors.peer.connector import peer_connector
from connectors.peer.leases import LeaseTable
from connectors.peer.links import PeerLinks
from connectors.tcp.blocks import LocalBlocks
from connectors.tcp.link import TcpLink
from connectors.tcp.server import TcpServer
from server.kv_handle import KVHandle


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
        return peer_connector(self, context, TcpTransport(self, context))


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
        links = PeerLinks(self._link)
        self.load, self.cancel, self.hold, self.release = links.load, links.cancel, links.hold, links.release
        self._links = links

    @property
    def address(self) -> str:
        """host:port; empty on a node that KV may not leave."""
        return "" if self._server is None else self._server.address

    def refusal(self, source: KVHandle) -> str | None:
        """Why its address is of no use."""
        return self._allowed.refusal(source.address)

    def start(self, caches: KVCaches, leases: LeaseTable) -> None:
        """Open for others."""
        self._blocks = LocalBlocks(caches)
        if self._server is not None:
            self._server.start(self._blocks, leases)

    def mark(self) -> None:
        """See PeerTransport."""
        assert self._blocks is not None
        self._blocks.mark()

    def _link(self, address: PeerAddress, engine_id: str) -> TcpLink:
        assert self._blocks is not None
        return TcpLink(
            address,
            engine_id,
            self._blocks,
            self._clock,
            num_threads=self._config.num_threads,
            peer_timeout_s=self._config.peer_timeout_seconds,
        )

    def close(self, timeout_s: float) -> None:
        """End all loads and threads; may be called twice."""
        until_s = time.monotonic() + timeout_s
        self._links.close(timeout_s)
        if self._server is not None:
            self._server.close(max(0.0, until_s - time.monotonic()))
