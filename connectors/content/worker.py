"""The half of a content connector that moves blocks."""

import time
from collections import deque

from connectors.base import ConnectorContext, ConnectorWorker, Finished, KVCaches
from connectors.content.groups import StoredGroup
from connectors.content.loads import Loads
from connectors.content.metadata import ContentMetadata
from connectors.content.patience import Patience
from connectors.content.saves import Saves
from connectors.layer_stages import LayerStages
from connectors.store import BlockStore
from connectors.threads import Threads

NUM_THREADS = 4


class ContentWorker(ConnectorWorker[ContentMetadata]):
    """Loads and saves on threads of its own, straight from and to the blocks where these are in host memory."""

    def __init__(
        self, store: BlockStore, context: ConnectorContext, asking: Threads, patience: Patience, *, layerwise: bool
    ) -> None:
        """Args: asking, patience: those of the scheduler half."""
        self._store = store
        self._context = context
        self._asking = asking
        self._patience = patience
        self._is_closed = False
        self._threads = Threads("outrider-kv", NUM_THREADS)
        self._groups: list[StoredGroup] = []
        self._loads = Loads(store, self._groups, self._threads, context.clock, self._end)
        self._saves = Saves(store, self._groups, self._threads, self._end)
        self._is_layerwise = layerwise
        self._stages: LayerStages | None = None
        self._ended: deque[tuple[Finished, frozenset[int]]] = deque()
        self._errors: frozenset[int] = frozenset()

    def register_kv_caches(self, caches: KVCaches) -> None:
        """Use these blocks."""
        self._groups += StoredGroup.all_of(caches, NUM_THREADS)
        for stored in self._groups:
            self._store.expect(stored.namespace, stored.group.block_nbytes)
        if self._is_layerwise:
            self._stages = LayerStages(caches.target.blocks)

    def start_load_kv(self, metadata: ContentMetadata) -> None:
        """Hand everything to the threads, loads first."""
        for stored in self._groups:
            stored.blocks.mark()
        for load in metadata.loads:
            self._loads.begin(load)
        for save in metadata.saves:
            self._saves.begin(save, None if self._stages is None else self._stages.claim(save))
        for seq_id in metadata.cancelled:
            self._loads.cancel(seq_id)
        if self._stages is not None:
            self._stages.begin(metadata.announced)

    @property
    def is_layerwise(self) -> bool:
        """Whether blocks are copied while they are filled."""
        return self._is_layerwise

    def save_kv_layer(self, layer: int) -> None:
        """Have it copied out of the blocks that the step fills, the target's only: drafts are not made by layers."""
        if self._stages is not None:
            self._stages.copy(layer)

    def wait_for_save(self) -> None:
        """Nobody waits: blocks that are given to others while they are copied are not saved."""
        if self._stages is not None:
            self._stages.end()

    def get_finished(self) -> Finished:
        """What the threads have ended; loads that wait for one end too if the store hangs."""
        self._loads.check(self._patience)
        finished, self._errors = Finished(), frozenset()
        for _ in range(len(self._ended)):
            ended, bad_blocks = self._ended.popleft()
            finished = finished.joined(ended)
            self._errors |= bad_blocks
        return finished

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        """Blocks that the store could not fill, and those behind them, which it was not asked for."""
        return self._errors

    def shutdown(self, timeout_s: float) -> None:
        """Let what was ordered end, as far as time is left; then close the store."""
        until_s = time.monotonic() + timeout_s
        self._loads.cancel_all()
        has_moved = self._threads.end(timeout_s)
        has_asked = self._asking.end(max(0.0, until_s - time.monotonic()))
        if self._stages is not None:
            self._stages.close(max(0.0, until_s - time.monotonic()))
        if has_moved and has_asked and not self._is_closed:
            self._is_closed = True
            self._store.close()

    def _end(self, finished: Finished, bad_blocks: frozenset[int]) -> None:
        self._ended.append((finished, bad_blocks))
        self._context.notify()
