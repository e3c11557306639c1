"""The half of a content connector that decides."""

import logging
from collections.abc import Sequence

from connectors.base import BlockLoad, BlockSave, ConnectorContext, ConnectorScheduler, KVRequest
from connectors.content.groups import namespace
from connectors.content.lookups import Lookups
from connectors.content.metadata import ContentMetadata
from connectors.content.patience import Patience
from connectors.misfit import misfit
from connectors.rare_log import RareLog
from connectors.store import BlockStore
from connectors.threads import Threads
from server.kv_handle import KVHandle

logger = logging.getLogger(__name__)

TARGET = "target"
"""The group whose blocks are looked for: without them those of the others are of no use."""


class ContentScheduler(ConnectorScheduler[ContentMetadata]):
    """Asks the store on a thread of its own, and orders what it was told of."""

    def __init__(
        self, store: BlockStore, context: ConnectorContext, asking: Threads, patience: Patience, *, layerwise: bool
    ) -> None:
        """Args: asking: that wait for the store's answers; the worker half ends them. patience: of both halves."""
        self._context = context
        self._lookups = Lookups(
            store,
            namespace(TARGET, context.fingerprint, context.block_size),
            asking,
            context.clock,
            context.notify,
        )
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
        lookup = self._lookups.get(request.seq_id)
        if lookup is None or lookup.first_block > first_block:  # blocks that were here are not any more
            self._lookups.forget(request.seq_id)
            is_of_use = self._context.is_consumer and first_block < len(request.hashes)
            if not is_of_use or self._patience.is_at_an_end:
                return 0
            self._lookups.ask(request.seq_id, first_block, list(request.hashes[first_block:]))
            return None
        if lookup.num_found is not None:
            self._lookups.forget(request.seq_id)
            if lookup.num_found == 0:
                self._tell_if_promised(request, lookup.first_block)
            return max(0, lookup.first_block + lookup.num_found - first_block) * block_size
        if self._patience.is_spent(lookup.since_s):
            self._patience.lose()
        elif not self._patience.is_at_an_end:
            return None
        self._lookups.forget(request.seq_id)
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
        if not self._lookups.forget(seq_id):
            self._cancelled.append(seq_id)
