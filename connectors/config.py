"""What every connector's settings have in common. Knows no connector, and imports none of their libraries."""

from typing import TYPE_CHECKING

from server.config_values import Section

if TYPE_CHECKING:
    from connectors.base import Connector, ConnectorContext


class ConnectorConfig(Section):
    """Settings of one connector: the keys of its `kv_connector_extra_config`, and how it is built."""

    def build(self, context: "ConnectorContext") -> "Connector":
        """Both halves. Raises: ConfigError if these settings cannot be met here."""
        raise NotImplementedError
