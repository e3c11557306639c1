"""Halves of a connector that say what they are told to, and keep what they hear."""

from collections.abc import Sequence

from connectors.base import (
    BlockLoad,
    BlockSave,
    Connector,
    ConnectorContext,
    ConnectorScheduler,
    ConnectorWorker,
    Finished,
    KVCaches,
    KVRequest,
)
from connectors.config import ConnectorConfig
from server.errors import ConfigError
from server.kv_handle import KVHandle


class ScriptedScheduler(ConnectorScheduler[str]):
    """Answers in the order in which it was given answers; 0 when there are none left."""

    def __init__(
        self,
        *answers: int | None,
        wants_saves: bool = True,
        wants_loads: bool = True,
        wants_announcements: bool = False,
        handle: KVHandle | None = None,
    ) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []
        self.requests: list[KVRequest] = []
        self.loads: list[BlockLoad] = []
        self.saves: list[BlockSave] = []
        self.announced: list[BlockSave] = []
        self.cancelled: list[int] = []
        self.metadata: str | None = None
        self.num_finished = 0
        self._wants_saves = wants_saves
        self._wants_loads = wants_loads
        self._wants_announcements = wants_announcements
        self._handle = handle

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> int | None:
        self.asked.append(num_computed_tokens)
        self.requests.append(request)
        return self.answers.pop(0) if self.answers else 0

    @property
    def wants_loads(self) -> bool:
        return self._wants_loads

    def update_state_after_alloc(self, load: BlockLoad) -> None:
        self.loads.append(load)

    @property
    def wants_saves(self) -> bool:
        return self._wants_saves

    def save(self, saves: Sequence[BlockSave]) -> None:
        self.saves += saves

    @property
    def wants_announcements(self) -> bool:
        return self._wants_announcements

    def announce(self, saves: Sequence[BlockSave]) -> None:
        self.announced += saves

    def build_connector_meta(self) -> str | None:
        return self.metadata

    def request_finished(self, request: KVRequest, block_ids: Sequence[int]) -> KVHandle | None:
        self.num_finished += 1
        return self._handle

    def cancel(self, seq_id: int) -> None:
        self.cancelled.append(seq_id)


class ScriptedWorker(ConnectorWorker[str]):
    """Reports what it was given to report."""

    def __init__(
        self, *, is_layerwise: bool = False, broken_layer: int | None = None, breaks_at_shutdown: bool = False
    ) -> None:
        """Args: broken_layer: saving it raises."""
        self.heard: list[str] = []
        self.finished = Finished()
        self.errors: frozenset[int] = frozenset()
        self._is_layerwise = is_layerwise
        self._broken_layer = broken_layer
        self._breaks_at_shutdown = breaks_at_shutdown

    def register_kv_caches(self, caches: KVCaches) -> None:
        self.heard.append(f"blocks of {caches.block_size}")

    def start_load_kv(self, metadata: str) -> None:
        self.heard.append(metadata)

    @property
    def is_layerwise(self) -> bool:
        return self._is_layerwise

    def wait_for_layer_load(self, layer: int) -> None:
        self.heard.append(f"wait for layer {layer}")

    def save_kv_layer(self, layer: int) -> None:
        self.heard.append(f"save layer {layer}")
        if layer == self._broken_layer:
            raise RuntimeError("broken")

    def wait_for_save(self) -> None:
        self.heard.append("wait for saves")

    def get_finished(self) -> Finished:
        finished, self.finished = self.finished, Finished()
        return finished

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        return self.errors

    def shutdown(self, timeout_s: float) -> None:
        self.heard.append(f"shutdown within {timeout_s:.0f} s")
        if self._breaks_at_shutdown:
            raise RuntimeError("broken")


BUILT: list[tuple[ConnectorContext, ScriptedWorker]] = []
"""What `ScriptedConfig` has built, with what; its tests clear it."""


class ScriptedConfig(ConnectorConfig):
    """Settings of a connector that can or cannot be built."""

    can_be_built: bool = True

    def build(self, context: ConnectorContext) -> Connector:
        """Both halves."""
        if not self.can_be_built:
            raise ConfigError("no such device")
        BUILT.append((context, ScriptedWorker()))
        return Connector(ScriptedScheduler(), BUILT[-1][1])
