"""The settings of a connector on a store that hangs when a test wants it to."""

from connectors.store import BlockStore
from connectors.store_config import StoreConfig
from tests.fakes.gated_store import GatedStore

STORES: list[GatedStore] = []
"""Those that were opened; tests clear it."""


class GatedConfig(StoreConfig):
    """Settings of a gated store."""

    def open_store(self) -> BlockStore:
        """Another one."""
        STORES.append(GatedStore())
        return STORES[-1]
