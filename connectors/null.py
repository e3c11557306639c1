"""A connector that has nothing and keeps nothing."""

from connectors.base import (
    BlockLoad,
    Connector,
    ConnectorContext,
    ConnectorScheduler,
    ConnectorWorker,
    Finished,
    KVCaches,
    KVRequest,
)
from connectors.config import ConnectorConfig, Way


class NullConfig(ConnectorConfig):
    """There is nothing to set."""

    def carriers(self, name: str, way: Way) -> frozenset[str]:
        """None."""
        return frozenset()

    def build(self, context: ConnectorContext) -> Connector:
        """Both halves."""
        return Connector(NullScheduler(), NullWorker())


class NullScheduler(ConnectorScheduler[None]):
    """Matches nothing, so that nothing is ever loaded, and wants no saves."""

    @property
    def wants_loads(self) -> bool:
        """Nothing is there."""
        return False

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> int | None:
        """None of them."""
        return 0

    def update_state_after_alloc(self, load: BlockLoad) -> None:
        """Not called, as nothing matches."""
        raise AssertionError(f"{load} was not offered")

    def build_connector_meta(self) -> None:
        """There is nothing to do."""


class NullWorker(ConnectorWorker[None]):
    """Moves nothing."""

    def register_kv_caches(self, caches: KVCaches) -> None:
        """They are not used."""

    def start_load_kv(self, metadata: None) -> None:
        """There is nothing to do."""

    def get_finished(self) -> Finished:
        """Nothing."""
        return Finished()

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        """None."""
        return frozenset()

    def shutdown(self, timeout_s: float) -> None:
        """Nothing runs."""
