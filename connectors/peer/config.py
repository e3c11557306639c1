"""Settings that connectors between nodes have in common."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from connectors.config import ConnectorConfig
from connectors.peer.address import LOOPBACK, AllowedPeers


def _checked(rules: tuple[str, ...]) -> tuple[str, ...]:
    AllowedPeers(rules)
    return rules


class PeerConfig(ConnectorConfig):
    """How long KV is held for other nodes, and which of them may be asked for theirs."""

    lease_seconds: float = Field(
        default=30.0, gt=0, le=3600, description="how long blocks are held for a node that gives no sign of life"
    )
    peer_timeout_seconds: float = Field(
        default=3.0,
        gt=0,
        le=600,
        description="a node that has begun to read and is silent for so long is gone; signs of life come 3 times in it",
    )
    transfer_timeout_seconds: float = Field(
        default=5.0, gt=0, le=600, description="a load that takes longer has failed; a request's deadline may be nearer"
    )
    allowed_peers: Annotated[tuple[str, ...], AfterValidator(_checked)] = Field(
        default=LOOPBACK,
        description="nodes that may be asked for KV: IP addresses, networks (10.0.0.0/8) or patterns of host names "
        "(*.prefill.svc), each with :port or for any port; clients name the node, so allow no more than there are",
    )

    @classmethod
    def hint(cls, name: str, values: Mapping[str, object]) -> str:
        """Whoever looks for a setting of stores hears why it is not here."""
        if name == "layerwise":
            return "; blocks stay in the cache until another node reads them, so nothing is saved while it is computed"
        return super().hint(name, values)
