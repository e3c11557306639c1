"""Settings of connectors that find blocks by their content."""

from connectors.base import Connector, ConnectorContext
from connectors.config import ConnectorConfig
from connectors.content import content_connector
from connectors.store import BlockStore


class StoreConfig(ConnectorConfig):
    """Settings of a store; a store's own class has fields and says how it is opened."""

    def open_store(self) -> BlockStore:
        """The store. Raises: ConfigError if these settings cannot be met here."""
        raise NotImplementedError

    def build(self, context: ConnectorContext) -> Connector:
        """A connector on the store."""
        return content_connector(self.open_store(), context)
