"""Settings of blocks in an LMCache server, which all engines of a machine share."""

from pydantic import Field

from connectors.store import BlockStore
from connectors.store_config import StoreConfig


class LMCacheConfig(StoreConfig):
    """Settings of blocks in an LMCache server."""

    host: str = Field(default="127.0.0.1", min_length=1, description="of the server, which runs on this machine")
    port: int = Field(default=5555, ge=1, le=65535, description="its --port")
    request_timeout_seconds: float = Field(
        default=1.0, gt=0, le=60, description="how long it may take to answer for one block, or for a look-up of some"
    )
    retry_after_seconds: float = Field(
        default=5.0, ge=0, le=3600, description="how long it is left alone when it did not answer"
    )

    def open_store(self) -> BlockStore:
        """A store on the server, which need not be there yet. Raises: ConfigError if lmcache is not installed."""
        from connectors.lmcache.package import import_lmcache
        from connectors.lmcache.server import LMCacheServer
        from connectors.lmcache.store import LMCacheStore

        import_lmcache()
        url = f"tcp://{self.host}:{self.port}"
        return LMCacheStore(LMCacheServer(url, self.request_timeout_seconds, self.retry_after_seconds))
