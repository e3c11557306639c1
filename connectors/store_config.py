"""Settings of connectors that find blocks by their content."""

from typing import TYPE_CHECKING

from pydantic import Field

from connectors.config import ConnectorConfig
from connectors.store import BlockStore

if TYPE_CHECKING:
    from connectors.base import Connector, ConnectorContext


class StoreConfig(ConnectorConfig):
    """Settings of a store; a store's own class has fields and says how it is opened."""

    layerwise: bool = Field(
        default=False, description="copy a prompt's blocks layer by layer, while later layers are computed"
    )

    def open_store(self) -> BlockStore:
        """The store. Raises: ConfigError if these settings cannot be met here."""
        raise NotImplementedError

    def build(self, context: "ConnectorContext") -> "Connector":
        """A connector on the store."""
        from connectors.content.connector import content_connector  # torch comes with it; settings are read without

        return content_connector(self.open_store(), context, layerwise=self.layerwise)
