"""KV from node to node by NIXL: one reads the other's memory, over RDMA, NVLink, shared memory or TCP."""

import importlib.util
import os
import socket
import time
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, Field

from connectors.base import Connector, ConnectorContext, KVCaches
from connectors.nixl.agent import NixlAgent, NixlFailed
from connectors.nixl.blocks import NixlBlocks
from connectors.nixl.link import NixlLink
from connectors.nixl.server import NixlServer, NixlServicer
from connectors.nixl.transports import checked_transports
from connectors.peer.address import AllowedPeers, PeerAddress
from connectors.peer.config import PeerConfig
from connectors.peer.connector import peer_connector
from connectors.peer.leases import LeaseTable
from connectors.peer.links import PeerLinks
from connectors.peer.transport import LoadOutcome, PeerLoad
from server.config_values import ByteCount
from server.errors import ConfigError
from server.kv_handle import KVHandle

_ANY = ("0.0.0.0", "::")


class NixlConfig(PeerConfig):
    """Settings of KV by NIXL."""

    host: str = Field(
        default="127.0.0.1",
        description="address at which other nodes ask where KV is; choose one of a network of your own, as whoever "
        "reaches it is told how to read this node's KV",
    )
    port: int = Field(default=0, ge=0, le=65535, description="for the same; 0 for any that is free")
    advertised_host: str | None = Field(
        default=None, description="what other nodes are told instead of host; needed where that is 0.0.0.0 or ::"
    )
    net_devices: str | None = Field(
        default=None,
        min_length=1,
        description="network devices that KV goes over, as UCX names them, such as mlx5_0:1 or eth0; without it, what "
        "UCX_NET_DEVICES says, and lo alone if that is not set",
    )
    transports: Annotated[str, AfterValidator(checked_transports)] | None = Field(
        default=None,
        min_length=1,
        description="UCX's transports, such as tcp,rc,cuda; tcp has to be one of them, and cuda_copy is added where "
        "there are NVIDIA GPUs and neither that nor cuda is named; without it, what UCX_TLS says, and all if that is "
        "not set",
    )
    num_threads: int = Field(default=2, ge=1, le=64, description="loads at a time from one other node")
    staging_bytes: ByteCount = Field(
        default=64 << 20,
        ge=1 << 16,
        description="memory, where the KV cache is, that KV comes to first; so much for each node that is read from",
    )

    def build(self, context: ConnectorContext) -> Connector:
        """Both halves. Raises: ConfigError if NIXL is not installed, or the address can not be had."""
        if importlib.util.find_spec("nixl") is None:
            raise ConfigError("kv_connector nixl needs NIXL, which is not installed: pip install 'outrider[nixl]'")
        try:
            checked_transports(self.transports or os.environ.get("UCX_TLS", "all"))
        except ValueError as error:
            raise ConfigError(f"environment variable UCX_TLS: {error}") from error
        return peer_connector(self, context, NixlTransport(self, context))


class NixlTransport:
    """One agent for both directions; see PeerTransport."""

    def __init__(self, config: NixlConfig, context: ConnectorContext) -> None:
        """Raises: ConfigError if the address can not be had."""
        self._config = config
        self._context = context
        self._allowed = AllowedPeers(config.allowed_peers)
        self._agent: NixlAgent | None = None
        self._blocks: NixlBlocks | None = None
        self._links = PeerLinks(self._link)
        self._server: NixlServer | None = None
        self.address = ""
        if context.is_producer:
            try:
                self._server = NixlServer(config.host, config.port)
            except OSError as error:
                raise ConfigError(f"KV can not be served at {config.host}:{config.port}: {error}") from error
            host = config.advertised_host or (socket.gethostname() if config.host in _ANY else config.host)
            self.address = str(PeerAddress(host, self._server.port))
        # Before NIXL is imported, which logs to the standard output.
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

    def refusal(self, source: KVHandle) -> str | None:
        """Why its address is of no use."""
        return self._allowed.refusal(source.address)

    def start(self, caches: KVCaches, leases: LeaseTable) -> None:
        """Make the agent, and open for others. Raises: ConfigError if NIXL can not do with these settings."""
        blocks = NixlBlocks(caches)
        net_devices, transports = self._config.net_devices, self._config.transports
        try:
            agent = NixlAgent(net_devices=net_devices, transports=transports, device=blocks.device)
        except NixlFailed as error:
            raise ConfigError(f"NIXL with net_devices {net_devices}, transports {transports}: {error}") from error
        self._agent, self._blocks = agent, blocks
        if self._server is not None:
            metadata = agent.submit(blocks.register).result()
            self._server.start(NixlServicer(self._context.engine_id, blocks, leases, agent, metadata))

    def mark(self) -> None:
        """See PeerTransport."""
        assert self._blocks is not None
        self._blocks.mark()

    def load(self, load: PeerLoad, ended: Callable[[LoadOutcome], None]) -> None:
        """See PeerTransport."""
        self._links.load(load, ended)

    def cancel(self, seq_id: int) -> None:
        """See PeerTransport."""
        self._links.cancel(seq_id)

    def hold(self, source: KVHandle) -> None:
        """See PeerTransport."""
        self._links.hold(source)

    def release(self, source: KVHandle) -> None:
        """See PeerTransport."""
        self._links.release(source)

    def _link(self, address: PeerAddress, engine_id: str) -> NixlLink:
        assert self._agent is not None
        assert self._blocks is not None
        return NixlLink(
            address,
            engine_id,
            self._agent,
            self._blocks,
            self._context.clock,
            num_threads=self._config.num_threads,
            staging_nbytes=self._config.staging_bytes,
            peer_timeout_s=self._config.peer_timeout_seconds,
        )

    def close(self, timeout_s: float) -> None:
        """End all loads and threads; may be called twice."""
        until_s = time.monotonic() + timeout_s
        self._links.close(timeout_s)
        if self._server is not None:
            self._server.close(max(0.0, until_s - time.monotonic()))
        if self._agent is not None:
            self._agent.close(max(0.0, until_s - time.monotonic()))
