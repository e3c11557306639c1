"""A connector that takes its time, changes its mind and fails, on what a fake device holds."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from connectors.base import BlockLoad, BlockSave, ConnectorScheduler, Finished, KVRequest, TransferPlan
from server.kv.block_pool import BlockPool
from server.kv_handle import KVHandle
from tests.fakes.executor import FakeExecutor

MAX_UNKNOWN = 5
"""Times in a row that a question is answered by None."""
_GARBAGE = -2
"""What a block holds while it is being written to."""
Cells = tuple[int | None, ...]


@dataclass
class FakeStore:
    """What several nodes can read: blocks by their content, and blocks that are leased."""

    blocks: dict[bytes, Cells] = field(default_factory=dict)
    leases: dict[str, tuple[Cells, ...]] = field(default_factory=dict)


@dataclass(eq=False)
class _Load:
    order: BlockLoad
    num_ticks: int
    is_lost: bool = False


@dataclass(eq=False)
class _Save:
    order: BlockSave
    cells: Cells
    num_ticks: int


@dataclass(eq=False)
class _Lease:
    seq_id: int
    block_ids: tuple[int, ...]
    cells: tuple[Cells, ...]
    num_ticks: int


@dataclass(frozen=True)
class FakeMetadata:
    """What was ordered."""

    loads: tuple[BlockLoad, ...]
    saves: tuple[BlockSave, ...]
    cancelled: tuple[int, ...]
    announced: tuple[BlockSave, ...]


class FakeConnector(ConnectorScheduler[FakeMetadata]):
    """Both halves of a connector, on one thread; nothing goes on but with `tick`.

    Attributes:
        num_loads, num_bad_blocks, num_saves, num_leases: that have ended. num_announced: saves that were announced.
    """

    def __init__(self, rng: random.Random, store: FakeStore, block_size: int) -> None:
        self._rng = rng
        self._store = store
        self._block_size = block_size
        self._slowness = rng.choice((1, 3, 10, 40))
        self._error_rate = rng.choice((0.0, 0.0, 0.1, 0.5))
        self._wants_saves = rng.random() < 0.8
        self._wants_announcements = self._wants_saves and rng.random() < 0.7
        self._hands_on = rng.choice(("nothing", "content", "lease", "lease"))
        self._node = rng.randrange(10**9)
        self._unknown: dict[int, int] = {}
        self._cancelled: set[int] = set()
        self._ordered: tuple[list[BlockLoad], list[BlockSave], list[int]] = ([], [], [])
        self._loads: list[_Load] = []
        self._saves: list[_Save] = []
        self._leases: dict[str, _Lease] = {}
        self._announced: tuple[BlockSave, ...] = ()
        self._filling: tuple[BlockSave, ...] = ()
        self._copies: dict[BlockSave, Cells] = {}
        self.num_loads = self.num_bad_blocks = self.num_saves = self.num_leases = self.num_announced = 0

    def bind(self, executor: FakeExecutor, pool: BlockPool) -> None:
        """Move what this device holds."""
        self._executor = executor
        self._pool = pool

    # -- the half that decides -------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> int | None:
        assert num_computed_tokens % self._block_size == 0
        assert request.seq_id not in self._cancelled, "asked for a sequence that was cancelled"
        left = self._unknown.setdefault(request.seq_id, self._rng.randint(0, MAX_UNKNOWN))
        if left > 0:
            self._unknown[request.seq_id] = left - 1
            return None
        del self._unknown[request.seq_id]
        num_blocks = self._count(request, num_computed_tokens // self._block_size)
        luck = self._rng.random()
        if luck < 0.2:
            num_blocks = self._rng.randint(0, num_blocks)
        elif luck < 0.3:
            num_blocks += self._rng.randint(1, 3)
        return num_blocks * self._block_size

    def _count(self, request: KVRequest, first: int) -> int:
        if request.source is not None and request.source.lease_id:
            num_leased = len(self._store.leases.get(request.source.lease_id, ()))
            return max(0, min(num_leased, len(request.hashes)) - first)
        found = [block_hash in self._store.blocks for block_hash in request.hashes[first:]]
        return [*found, False].index(False)

    def update_state_after_alloc(self, load: BlockLoad) -> None:
        assert load.seq_id not in self._cancelled
        assert len(load.block_ids) == len(load.hashes) > 0
        for block_id in load.block_ids:
            assert self._pool._references[block_id] == 1
            assert self._pool._hash_of[block_id] is None
        self._ordered[0].append(load)

    @property
    def wants_saves(self) -> bool:
        return self._wants_saves

    def save(self, saves: Sequence[BlockSave]) -> None:
        assert self._wants_saves
        for save in saves:
            assert self._pool._hash_of[save.block_id] == save.block_hash
        self._ordered[1].extend(saves)

    @property
    def wants_announcements(self) -> bool:
        return self._wants_announcements

    def announce(self, saves: Sequence[BlockSave]) -> None:
        assert not self._announced, "what was announced before has got no step"
        self._announced = tuple(saves)

    def build_connector_meta(self) -> FakeMetadata | None:
        (loads, saves, cancelled), announced = self._ordered, self._announced
        self._ordered, self._announced = ([], [], []), ()
        if not (loads or saves or cancelled or announced):
            return None
        return FakeMetadata(tuple(loads), tuple(saves), tuple(cancelled), announced)

    def request_finished(self, request: KVRequest, block_ids: Sequence[int]) -> KVHandle | None:
        if self._hands_on == "nothing":
            return None
        lease_id = ""
        if self._hands_on == "lease":
            lease_id = f"{self._node}-{request.seq_id}"
            cells = tuple(self._executor.block(block_id) for block_id in block_ids)
            num_ticks = self._rng.randint(1, 60)
            self._leases[lease_id] = _Lease(request.seq_id, tuple(block_ids), cells, num_ticks)
            self._store.leases[lease_id] = cells
        return KVHandle(
            connector="fake",
            engine_id=str(self._node),
            address="",
            lease_id=lease_id,
            num_tokens=len(block_ids) * self._block_size,
            block_ids=tuple(block_ids),
            block_size=self._block_size,
            fingerprint="",
        )

    def cancel(self, seq_id: int) -> None:
        self._cancelled.add(seq_id)
        self._unknown.pop(seq_id, None)
        self._ordered[2].append(seq_id)

    # -- the half that moves ---------------------------------------------------------------

    def begin(self, plan: TransferPlan) -> None:
        """Start what was ordered."""
        metadata = plan.metadata
        assert plan.filled_blocks == tuple(block_id for load in metadata.loads for block_id in load.block_ids)
        for order in metadata.loads:
            self._loads.append(_Load(order, self._rng.randint(0, self._slowness)))
            self._spoil(order)
        for save in metadata.saves:
            cells = self._executor.block(save.block_id)
            self._saves.append(_Save(save, cells, self._rng.randint(0, self._slowness)))
            if save.announcement is not None:
                assert self._copies.pop(save) == cells, "the step that it was announced for has filled it otherwise"
                self.num_announced += 1
        self._filling = metadata.announced
        for seq_id in metadata.cancelled:
            for load in self._loads:
                load.is_lost |= load.order.seq_id == seq_id and self._rng.random() < 0.5
            for lease in self._leases.values():
                if lease.seq_id == seq_id:
                    lease.num_ticks = 0

    def _spoil(self, order: BlockLoad) -> None:
        for block_id in order.block_ids:
            self._executor.fill(block_id, (_GARBAGE,) * self._block_size)

    def end_step(self, *, has_run: bool) -> None:
        """Copy what the step has filled that was begun last."""
        if has_run:
            self._copies.update({save: self._executor.block(save.block_id) for save in self._filling})
        self._filling = ()

    def poll(self) -> tuple[Finished, frozenset[int]]:
        """Time goes on by one step. Returns: what has ended by then, and blocks that were not loaded."""
        loads = [load for load in self._loads if load.num_ticks <= 0]
        saves = [save for save in self._saves if save.num_ticks <= 0]
        leases = [lease_id for lease_id, lease in self._leases.items() if lease.num_ticks <= 0]
        self._check()
        bad = frozenset(block_id for load in loads for block_id in self._end_load(load))
        for save in saves:
            self._end_save(save)
        for lease_id in leases:
            del self._leases[lease_id], self._store.leases[lease_id]
        for load in self._loads:
            load.num_ticks -= 1
        for save in self._saves:
            save.num_ticks -= 1
        for lease in self._leases.values():
            lease.num_ticks -= 1
        self.num_loads += len(loads)
        self.num_bad_blocks += len(bad)
        self.num_saves += len(saves)
        self.num_leases += len(leases)
        finished = Finished(
            loaded=tuple(load.order.seq_id for load in loads),
            saved=tuple(save.order.block_id for save in saves),
            released=tuple(leases),
        )
        return finished, bad

    def _check(self) -> None:
        """Nobody has touched what is being written to, or changed what is being read from."""
        for load in self._loads:
            for block_id in load.order.block_ids:
                assert self._executor.block(block_id) == (_GARBAGE,) * self._block_size
        for save in self._saves:
            assert self._executor.block(save.order.block_id) == save.cells
        for lease in self._leases.values():
            assert tuple(map(self._executor.block, lease.block_ids)) == lease.cells

    def _end_load(self, load: _Load) -> list[int]:
        """Write what is there. Returns: blocks that are not what they should be."""
        self._loads.remove(load)
        order, bad = load.order, []
        for place, (block_id, block_hash) in enumerate(zip(order.block_ids, order.hashes, strict=True)):
            cells = self._content(order, order.first_block + place, block_hash)
            if cells is None or load.is_lost or self._rng.random() < self._error_rate:
                bad.append(block_id)
            else:
                self._executor.fill(block_id, cells)
        return bad

    def _content(self, order: BlockLoad, place: int, block_hash: bytes) -> Cells | None:
        if order.source is not None and order.source.lease_id:
            leased = self._store.leases.get(order.source.lease_id, ())
            return leased[place] if place < len(leased) else None
        return self._store.blocks.get(block_hash)

    def _end_save(self, save: _Save) -> None:
        self._saves.remove(save)
        if self._rng.random() >= self._error_rate:
            there = self._store.blocks.setdefault(save.order.block_hash, save.cells)
            assert there == save.cells, "other content under the same hash"

    @property
    def is_busy(self) -> bool:
        """Whether something will come of it."""
        return bool(self._unknown or self._loads or self._saves or self._leases)

    @property
    def held(self) -> Counter[int]:
        """Blocks that it reads from or writes to, and how often."""
        held = Counter(save.order.block_id for save in self._saves)
        for load in self._loads:
            held.update(load.order.block_ids)
        for lease in self._leases.values():
            held.update(lease.block_ids)
        return held
