"""A connector that finds blocks by their content, in a store that it only knows as such."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from connectors.base import (
    BlockLoad,
    BlockSave,
    Connector,
    ConnectorContext,
    ConnectorScheduler,
    ConnectorWorker,
    Finished,
    KVCaches,
    KVGroup,
    KVRequest,
)
from connectors.host_blocks import HostBlocks
from connectors.layer_stages import LayerStages, StagedBlock
from connectors.misfit import misfit
from connectors.rare_log import RareLog
from connectors.save_failure import SaveFailure
from connectors.store import BlockStore
from connectors.threads import Threads
from server.kv_handle import KVHandle

logger = logging.getLogger(__name__)

STORE_TIMEOUT_S = 2.0
"""How long the store may take to say what it has, and to load a block."""
PAUSE_S = 5.0
"""A store that took longer is left alone for so long."""
NUM_THREADS = 4


def namespace(group: KVGroup, block_size: int) -> str:
    """What the bytes of a group's blocks mean."""
    return f"{group.fingerprint}-{group.name}-{block_size}"


def content_connector(store: BlockStore, context: ConnectorContext, *, layerwise: bool = False) -> Connector:
    """Both halves on a store, which is closed with them.

    Args: layerwise: whether blocks of prompts are copied layer by layer, while their step computes the next ones.
    """
    asking, patience = Threads("outrider-kv-find", 1), Patience(context)
    layerwise = layerwise and context.is_producer
    return Connector(
        ContentScheduler(store, context, asking, patience, layerwise=layerwise),
        ContentWorker(store, context, asking, patience, layerwise=layerwise),
    )


class Patience:
    """Whether the store is left alone for a while, as it hangs; on the step thread."""

    def __init__(self, context: ConnectorContext) -> None:
        self._context = context
        self._paused_until_s = -1.0

    @property
    def is_at_an_end(self) -> bool:
        """Whether it is."""
        return self._context.clock() < self._paused_until_s

    def lose(self) -> None:
        """Leave it alone from now on."""
        if not self.is_at_an_end:
            logger.warning("the %s store hangs; it is left alone for %g s", self._context.name, PAUSE_S)
            self._paused_until_s = self._context.clock() + PAUSE_S


@dataclass(frozen=True, slots=True)
class ContentMetadata:
    """What is to be done next.

    Attributes:
        cancelled: loads that nobody waits for any more, if there are such. announced: what the step fills.
    """

    loads: tuple[BlockLoad, ...]
    saves: tuple[BlockSave, ...]
    cancelled: tuple[int, ...] = ()
    announced: tuple[BlockSave, ...] = ()


@dataclass(slots=True)
class _Lookup:
    """A question to the store: how many blocks it has from the first one on; None until it has answered."""

    first_block: int
    until_s: float
    num_found: int | None = None
    is_wanted: bool = True


@dataclass(slots=True)
class _Loading:
    """A load that waits for a thread, or has one. Attributes: since_s: when its current block was begun."""

    order: BlockLoad
    since_s: float
    is_wanted: bool = True


class ContentScheduler(ConnectorScheduler[ContentMetadata]):
    """Asks the store on a thread of its own, and orders what it was told of."""

    def __init__(
        self, store: BlockStore, context: ConnectorContext, asking: Threads, patience: Patience, *, layerwise: bool
    ) -> None:
        """Args: asking: that wait for the store's answers; the worker half ends them. patience: of both halves."""
        self._store = store
        self._context = context
        self._namespace = f"{context.fingerprint}-target-{context.block_size}"
        self._asking = asking
        self._lookups: dict[int, _Lookup] = {}
        self._patience = patience
        self._loads: list[BlockLoad] = []
        self._saves: list[BlockSave] = []
        self._cancelled: list[int] = []
        self._announced: tuple[BlockSave, ...] = ()
        self._is_layerwise = layerwise
        self._log = RareLog(logger, context.clock)

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> int | None:
        """None until the store has answered; 0 if it did not in time."""
        block_size = self._context.block_size
        first_block = num_computed_tokens // block_size
        now = self._context.clock()
        lookup = self._lookups.get(request.seq_id)
        if lookup is None or lookup.first_block > first_block:  # blocks that were here are not any more
            self._forget(request.seq_id)
            is_of_use = self._context.is_consumer and first_block < len(request.hashes)
            if not is_of_use or self._patience.is_at_an_end:
                return 0
            lookup = self._lookups[request.seq_id] = _Lookup(first_block, now + STORE_TIMEOUT_S)
            self._asking.submit(partial(self._ask, lookup, list(request.hashes[first_block:])))
            return None
        if lookup.num_found is not None:
            del self._lookups[request.seq_id]
            if lookup.num_found == 0:
                self._tell_if_promised(request, lookup.first_block)
            return max(0, lookup.first_block + lookup.num_found - first_block) * block_size
        if now >= lookup.until_s:
            self._patience.lose()
        elif not self._patience.is_at_an_end:
            return None
        self._forget(request.seq_id)
        return 0

    def _tell_if_promised(self, request: KVRequest, first_block: int) -> None:
        """A store that lacks what another node says it has saved is perhaps another one, or asked for other blocks."""
        source = request.source
        if source is None or source.connector != self._context.name:
            return
        if source.num_tokens > first_block * self._context.block_size:
            reason = misfit(source, self._context)
            if reason is None and source.block_size != self._context.block_size:
                reason = f"blocks of {source.block_size} tokens there, of {self._context.block_size} here"
            self._log.warning(
                "handle",
                "request %s is computed here: none of its KV is in the %s store of this node%s",
                request.request_id,
                self._context.name,
                "" if reason is None else f", and would not fit: {reason}",
            )

    def _forget(self, seq_id: int) -> bool:
        """Returns: whether something was asked for it."""
        lookup = self._lookups.pop(seq_id, None)
        if lookup is not None:
            lookup.is_wanted = False
        return lookup is not None

    def _ask(self, lookup: _Lookup, hashes: Sequence[bytes]) -> None:
        if not lookup.is_wanted:
            return  # the store had others to answer for too long
        num_found = 0
        try:
            num_found = self._store.find(self._namespace, hashes)
        finally:
            lookup.num_found = num_found
            self._context.notify()

    @property
    def wants_loads(self) -> bool:
        """Whether KV may come in."""
        return self._context.is_consumer

    def update_state_after_alloc(self, load: BlockLoad) -> None:
        """Order it with the next metadata."""
        self._loads.append(load)

    @property
    def wants_saves(self) -> bool:
        """Whether KV may leave."""
        return self._context.is_producer

    def save(self, saves: Sequence[BlockSave]) -> None:
        """Order them all with the next metadata."""
        self._saves += saves

    @property
    def wants_announcements(self) -> bool:
        """Whether blocks are copied while they are filled."""
        return self._is_layerwise

    def announce(self, saves: Sequence[BlockSave]) -> None:
        """They go with the next metadata."""
        self._announced = tuple(saves)

    def build_connector_meta(self) -> ContentMetadata | None:
        """What was ordered since the last one."""
        if not (self._loads or self._saves or self._cancelled or self._announced):
            return None
        metadata = ContentMetadata(tuple(self._loads), tuple(self._saves), tuple(self._cancelled), self._announced)
        self._loads, self._saves, self._cancelled, self._announced = [], [], [], ()
        return metadata

    def request_finished(self, request: KVRequest, block_ids: Sequence[int]) -> KVHandle | None:
        """Whoever goes on finds the blocks by their hashes, once they are saved."""
        if not self._context.is_producer:
            return None
        return KVHandle(
            connector=self._context.name,
            engine_id=self._context.engine_id,
            address="",
            lease_id="",
            num_tokens=len(block_ids) * self._context.block_size,
            block_ids=(),
            block_size=self._context.block_size,
            fingerprint=self._context.fingerprint,
            description=self._context.kv_description,
        )

    def cancel(self, seq_id: int) -> None:
        """Forget a question; of a load, what was not begun yet."""
        if not self._forget(seq_id):
            self._cancelled.append(seq_id)


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
        self._groups: list[tuple[str, KVGroup, HostBlocks]] = []
        self._is_layerwise = layerwise
        self._stages: LayerStages | None = None
        self._queued: dict[int, _Loading] = {}
        self._moving: dict[int, _Loading] = {}
        self._ended: deque[tuple[Finished, frozenset[int]]] = deque()
        self._errors: frozenset[int] = frozenset()

    def register_kv_caches(self, caches: KVCaches) -> None:
        """Use these blocks."""
        for group in caches.groups:
            self._store.expect(namespace(group, caches.block_size), group.block_nbytes)
        self._groups = [
            (namespace(group, caches.block_size), group, HostBlocks(group.blocks, NUM_THREADS))
            for group in caches.groups
        ]
        if self._is_layerwise:
            self._stages = LayerStages(caches.target.blocks)

    def start_load_kv(self, metadata: ContentMetadata) -> None:
        """Hand everything to the threads, loads first."""
        for _, _, blocks in self._groups:
            blocks.mark()
        for load in metadata.loads:
            self._queued[load.seq_id] = _Loading(load, self._context.clock())
            self._threads.submit(partial(self._load, load.seq_id))
        for save in metadata.saves:
            staged = None if self._stages is None else self._stages.claim(save)
            self._threads.submit(partial(self._save, save, staged))
        for seq_id in metadata.cancelled:
            self._cancel(seq_id)
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
        overdue_s = self._context.clock() - STORE_TIMEOUT_S
        if any(loading.since_s <= overdue_s for loading in list(self._moving.values())):
            self._patience.lose()
            for seq_id in list(self._queued):
                self._cancel(seq_id)
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
        for seq_id in [*self._queued, *self._moving]:
            self._cancel(seq_id)
        has_moved = self._threads.end(timeout_s)
        has_asked = self._asking.end(max(0.0, until_s - time.monotonic()))
        if self._stages is not None:
            self._stages.close(max(0.0, until_s - time.monotonic()))
        if has_moved and has_asked and not self._is_closed:
            self._is_closed = True
            self._store.close()

    def _cancel(self, seq_id: int) -> None:
        """End a load: now, if it still waits for a thread, else behind the block that is being loaded."""
        loading = self._queued.pop(seq_id, None)
        if loading is not None:
            self._end(Finished(loaded=(seq_id,)), frozenset(loading.order.block_ids))
        elif (loading := self._moving.get(seq_id)) is not None:
            loading.is_wanted = False

    def _load(self, seq_id: int) -> None:
        loading = self._queued.pop(seq_id, None)  # by one thread only, the step thread's `_cancel` included
        if loading is None:
            return
        loading.since_s = self._context.clock()
        self._moving[seq_id] = loading
        load = loading.order
        num_good, complete = 0, []
        try:
            for block_id, block_hash in zip(load.block_ids, load.hashes, strict=True):
                if not loading.is_wanted:
                    break
                loading.since_s = self._context.clock()
                filled = [self._fill(index, block_id, block_hash) for index in range(len(self._groups))]
                if not filled[0]:
                    break
                num_good += 1
                if all(filled):
                    complete.append(block_id)
        except Exception:
            logger.exception("loading blocks failed")
        del self._moving[seq_id]
        self._end(Finished(loaded=(load.seq_id,), complete=tuple(complete)), frozenset(load.block_ids[num_good:]))

    def _fill(self, index: int, block_id: int, block_hash: bytes) -> bool:
        name, _, blocks = self._groups[index]
        with blocks.writing(block_id) as buffer:
            return self._store.load(name, block_hash, buffer)

    def _save(self, save: BlockSave, staged: StagedBlock | None) -> None:
        try:
            failure = self._keep(save, None if staged is None else staged.data)
        except Exception:
            logger.exception("saving a block failed")
            failure = SaveFailure.BROKEN
        failures = () if failure is None else (failure,)
        self._end(Finished(saved=(save.block_id,), save_failures=failures), frozenset())

    def _keep(self, save: BlockSave, target: memoryview | None) -> SaveFailure | None:
        """Save all groups of a block, up to the first that the store does not keep.

        Args: target: the target's bytes, if there is a copy of them.
        """
        copies = [target, *(None for _ in self._groups[1:])]
        for (name, group, blocks), copy in zip(self._groups, copies, strict=True):
            if group.is_whole(save.block_id):
                with blocks.reading(save.block_id) if copy is None else nullcontext(copy) as data:
                    failure = self._store.save(name, save.block_hash, data)
                if failure is not None:
                    return failure
        return None

    def _end(self, finished: Finished, bad_blocks: frozenset[int]) -> None:
        self._ended.append((finished, bad_blocks))
        self._context.notify()
