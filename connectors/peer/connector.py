"""KV straight from the node that computed it: which loads to order, and whose blocks to hold."""

import logging
import re
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

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
from connectors.misfit import misfit
from connectors.peer.config import PeerConfig
from connectors.peer.leases import LEASE_NBYTES, LeaseTable
from connectors.peer.sweeper import LeaseSweeper
from connectors.peer.transport import LoadOutcome, PeerLoad, PeerTransport
from connectors.rare_log import RareLog
from server.kv_handle import KVHandle

logger = logging.getLogger(__name__)

MAX_BLOCK_SIZE = 4096
MAX_BLOCK_ID = 2**31 - 1
NUM_SPENT = 4096
"""Leases that are remembered because a load of theirs was ordered: it comes once."""
_ENGINE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LEASE_ID = re.compile(rf"[0-9a-f]{{{2 * LEASE_NBYTES}}}")


@dataclass(frozen=True, slots=True)
class PeerMetadata:
    """What the worker half is to do next.

    Attributes:
        loads: to begin. cancelled: loads that nobody waits for any more.
        holds: leases that a load may follow for. releases: leases that none will follow for.
    """

    loads: tuple[PeerLoad, ...] = ()
    cancelled: tuple[int, ...] = ()
    holds: tuple[KVHandle, ...] = ()
    releases: tuple[KVHandle, ...] = ()


class PeerScheduler(ConnectorScheduler[PeerMetadata]):
    """Answers from the handle that came with a request; a handle is not trusted."""

    def __init__(
        self,
        transport: PeerTransport,
        leases: LeaseTable,
        context: ConnectorContext,
        *,
        transfer_timeout_s: float,
    ) -> None:
        """Args: leases: those of the worker half."""
        self._transport = transport
        self._leases = leases
        self._context = context
        self._transfer_timeout_s = transfer_timeout_s
        self._asked: dict[int, KVRequest] = {}
        self._spent: OrderedDict[str, None] = OrderedDict()
        self._loads: list[PeerLoad] = []
        self._cancelled: list[int] = []
        self._holds: dict[str, KVHandle] = {}
        self._releases: dict[str, KVHandle] = {}
        self._log = RareLog(logger, context.clock)

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> int:
        """What the handle promises beyond the tokens that are here, if it is one that can be used."""
        source = request.source
        if source is None or source.connector != self._context.name or not self._context.is_consumer:
            return 0  # who has it, if anybody here, is another one
        if source.lease_id in self._spent:
            return 0
        reason = self._refusal(source, request)
        if reason is None and (reason := misfit(source, self._context)) is not None:
            self._give_back(source)
        if reason is not None:
            self._log.warning("handle", "request %s is computed here: %s", request.request_id, reason)
            return 0
        block_size = self._context.block_size
        num_blocks = min(source.num_tokens // block_size, len(request.hashes))
        num_tokens = num_blocks * block_size - num_computed_tokens
        if num_tokens <= 0:
            self._give_back(source)
            return 0
        self._asked[request.seq_id] = request
        self._holds[source.lease_id] = source
        return num_tokens

    def _refusal(self, source: KVHandle, request: KVRequest) -> str | None:
        """Why a handle is not to be followed. The cheap checks bound what the others look at."""
        if not _LEASE_ID.fullmatch(source.lease_id) or not _ENGINE_ID.fullmatch(source.engine_id):
            return "lease or engine id of its KV have another form"
        if not 0 < source.block_size <= MAX_BLOCK_SIZE or not 0 <= source.num_tokens <= request.num_tokens:
            return f"{source.num_tokens} tokens in blocks of {source.block_size}, of {request.num_tokens} known ones"
        if len(source.block_ids) * source.block_size != source.num_tokens:
            return f"{source.num_tokens} tokens in {len(source.block_ids)} blocks of {source.block_size}"
        if not all(0 <= block_id <= MAX_BLOCK_ID for block_id in source.block_ids):
            return "numbers of blocks out of range"
        return self._transport.refusal(source)

    def _give_back(self, source: KVHandle) -> None:
        """Nothing will be read: who holds the blocks need not do so until the lease ends."""
        self._spend(source)
        self._releases[source.lease_id] = source

    def _spend(self, source: KVHandle) -> None:
        self._spent[source.lease_id] = None
        self._holds.pop(source.lease_id, None)
        if len(self._spent) > NUM_SPENT:
            self._spent.popitem(last=False)

    @property
    def wants_loads(self) -> bool:
        """Whether KV may come in."""
        return self._context.is_consumer

    def update_state_after_alloc(self, load: BlockLoad) -> None:
        """Order it with the next metadata."""
        assert load.source is not None
        request = self._asked.pop(load.seq_id)
        until_s = self._context.clock() + self._transfer_timeout_s
        self._spend(load.source)
        self._loads.append(
            PeerLoad(
                load.seq_id,
                load.source,
                load.block_ids,
                load.hashes,
                load.first_block,
                until_s if request.deadline_s is None else min(until_s, request.deadline_s),
                request.hash_blocks,
            )
        )

    @property
    def load_timeout_s(self) -> float:
        """Loads end in time by themselves; this is for what hangs all the same."""
        return 2 * self._transfer_timeout_s

    def build_connector_meta(self) -> PeerMetadata | None:
        """What was ordered since the last one; who was asked for and got no blocks is asked for again."""
        self._asked.clear()
        if not (self._loads or self._cancelled or self._holds or self._releases):
            return None
        metadata = PeerMetadata(
            tuple(self._loads), tuple(self._cancelled), tuple(self._holds.values()), tuple(self._releases.values())
        )
        self._loads, self._cancelled, self._holds, self._releases = [], [], {}, {}
        return metadata

    def request_finished(self, request: KVRequest, block_ids: Sequence[int]) -> KVHandle | None:
        """Hold the blocks under a lease."""
        if not self._context.is_producer or not block_ids:
            return None
        return KVHandle(
            connector=self._context.name,
            engine_id=self._context.engine_id,
            address=self._transport.address,
            lease_id=self._leases.grant(request.seq_id, block_ids, request.hashes[: len(block_ids)]),
            num_tokens=len(block_ids) * self._context.block_size,
            block_ids=tuple(block_ids),
            block_size=self._context.block_size,
            fingerprint=self._context.fingerprint,
            description=self._context.kv_description,
        )

    def cancel(self, seq_id: int) -> None:
        """Of a load: stop it. Of a sequence that was handed on: end its lease."""
        self._cancelled.append(seq_id)
        self._leases.cancel(seq_id)


class PeerWorker(ConnectorWorker[PeerMetadata]):
    """Keeps account of what the transport does."""

    def __init__(
        self, transport: PeerTransport, leases: LeaseTable, context: ConnectorContext, *, sweep_period_s: float
    ) -> None:
        self._transport = transport
        self._leases = leases
        self._context = context
        self._sweeper = LeaseSweeper(leases, sweep_period_s)
        self._ended: deque[tuple[int, LoadOutcome]] = deque()
        self._bad: frozenset[int] = frozenset()

    def register_kv_caches(self, caches: KVCaches) -> None:
        """Serve these blocks, and load to them."""
        self._transport.start(caches, self._leases)
        if self._transport.address:
            logger.info("KV is served to other nodes at %s", self._transport.address)

    def start_load_kv(self, metadata: PeerMetadata) -> None:
        """Pass everything on to the transport."""
        self._transport.mark()
        for source in metadata.holds:
            self._transport.hold(source)
        for load in metadata.loads:
            self._transport.load(load, partial(self._end, load.seq_id))
        for seq_id in metadata.cancelled:
            self._transport.cancel(seq_id)
        for source in metadata.releases:
            self._transport.release(source)

    def _end(self, seq_id: int, outcome: LoadOutcome) -> None:
        self._ended.append((seq_id, outcome))
        self._context.notify()

    def get_finished(self) -> Finished:
        """Loads that have ended, and leases that were released."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        self._bad = frozenset().union(*(outcome.bad for _, outcome in ended))
        return Finished(
            loaded=tuple(seq_id for seq_id, _ in ended),
            complete=tuple(block_id for _, outcome in ended for block_id in outcome.complete),
            released=self._leases.take_released(),
        )

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        """Blocks of loads that ended before `get_finished` was last called."""
        return self._bad

    def shutdown(self, timeout_s: float) -> None:
        """End all leases, loads and threads."""
        until_s = time.monotonic() + timeout_s
        self._sweeper.close(timeout_s)
        self._transport.close(max(0.0, until_s - time.monotonic()))


def peer_connector(config: PeerConfig, context: ConnectorContext, transport: PeerTransport) -> Connector:
    """Both halves, around what moves the blocks."""
    leases = LeaseTable(
        lease_s=config.lease_seconds,
        peer_timeout_s=config.peer_timeout_seconds,
        clock=context.clock,
        notify=context.notify,
    )
    return Connector(
        PeerScheduler(transport, leases, context, transfer_timeout_s=config.transfer_timeout_seconds),
        PeerWorker(transport, leases, context, sweep_period_s=min(0.25, config.peer_timeout_seconds / 10)),
    )
