"""What every connector's settings have in common. Knows no connector, and imports none of their libraries."""

from typing import TYPE_CHECKING, Literal, TypeAlias

from server.config_values import Section

if TYPE_CHECKING:
    from connectors.base import Connector, ConnectorContext


Way: TypeAlias = Literal["out", "in"]
"""From this node to others, or from others to this one."""


class ConnectorConfig(Section):
    """Settings of one connector: the keys of its `kv_connector_extra_config`, and how it is built."""

    def carriers(self, name: str, way: Way) -> frozenset[str]:
        """By connectors of which names KV gets to other nodes, or here from them; none if it stays in this process.

        Args: name: of this connector. A `KVHandle` has one of these names.
        """
        return frozenset({name})

    def build(self, context: "ConnectorContext") -> "Connector":
        """Both halves. Raises: ConfigError if these settings cannot be met here."""
        raise NotImplementedError
