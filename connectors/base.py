"""What moves KV blocks in and out of an engine: the two halves of a connector, and what passes between them.

Both halves live in one process and are used from its step thread. The scheduler half decides and never does I/O; the
worker half does it on threads of its own. Between two steps the scheduler half's metadata goes to the worker half, and
what that has finished comes back. Whoever finishes something calls `notify`, from any thread, so that an engine without
other work looks.

Only full blocks move. A block is named by the hash of its tokens and of all in front of them, see
server/kv/prefix_cache.py, or, between peers, by its number on the node that holds it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from torch import Tensor

from connectors.save_failure import SaveFailure
from server.kv_handle import KVHandle

HashBlocks: TypeAlias = Callable[[int], Sequence[bytes]]

LOAD_TIMEOUT_S = 10.0
"""Unless a connector says otherwise."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """What one network keeps for each block.

    Attributes:
        name: "target", or of a drafting network.
        fingerprint: hex; blocks may be exchanged between groups of the same name and fingerprint. The block size is
            not in it.
        blocks: [num_blocks, layers, kv_heads, block_size, 2 * head_dim] or, of what is kept once for a block,
            [num_blocks, n]; each block contiguous.
        is_whole: whether a block has content at all; a drafting network may have done other blocks than the target.
    """

    name: str
    fingerprint: str
    blocks: Tensor
    is_whole: Callable[[int], bool] = lambda _: True

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block."""
        return self.blocks[0].numel() * self.blocks.element_size()


@dataclass(frozen=True, slots=True)
class KVCaches:
    """All that is kept for the blocks of an engine.

    Attributes:
        groups: the target's first. block_size: in tokens.
    """

    groups: tuple[KVGroup, ...]
    block_size: int

    @property
    def target(self) -> KVGroup:
        """The target's."""
        return self.groups[0]


@dataclass(frozen=True, slots=True)
class KVRequest:
    """A sequence as a connector sees it.

    Attributes:
        seq_id: names it and its load in this engine; never used again.
        num_tokens: all that are known.
        hashes: of the full blocks whose KV it can do with: all but the one its last token is in.
        source: where its KV is held; None if nobody said so.
        deadline_s: when it ends, on the engine's clock; None if never.
        hash_blocks: the hashes of its full blocks, if these had so many tokens; takes a moment, from any thread. None
            if nobody can tell.
    """

    seq_id: int
    request_id: str
    num_tokens: int
    hashes: Sequence[bytes]
    source: KVHandle | None = None
    deadline_s: float | None = None
    hash_blocks: HashBlocks | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Blocks to be filled for a sequence.

    Attributes:
        seq_id: see KVRequest. block_ids: to write to. hashes: of what is to be there.
        first_block: their place among the sequence's blocks.
        source: see KVRequest.
    """

    seq_id: int
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    first_block: int = 0
    source: KVHandle | None = None


@dataclass(frozen=True, slots=True)
class BlockSave:
    """A full block whose tokens have settled; it stays as it is until it was reported as saved.

    Attributes: announcement: number of the one that it equals, see ConnectorScheduler.announce; None without one.
    """

    block_id: int
    block_hash: bytes
    announcement: int | None = None


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What goes from the scheduler to the worker between two steps.

    Attributes:
        metadata: what the scheduler half built, of the connector's own type; None for nothing.
        filled_blocks: of the loads in it.
    """

    metadata: Any
    filled_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """What the worker half has finished since it was asked last.

    Attributes:
        loaded: sequences whose loads have ended, well or not: nothing writes to their blocks any more.
        complete: blocks of these loads that were filled in all groups.
        saved: blocks whose saves have ended, well or not.
        released: leases that nobody reads from any more.
        save_failures: of saves that have ended and are not kept, one for each block and store.
    """

    loaded: tuple[int, ...] = ()
    complete: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    released: tuple[str, ...] = ()
    save_failures: tuple[SaveFailure, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.loaded or self.saved or self.released or self.save_failures)

    def joined(self, other: "Finished") -> "Finished":
        """What both have."""
        return Finished(
            self.loaded + other.loaded,
            self.complete + other.complete,
            self.saved + other.saved,
            self.released + other.released,
            self.save_failures + other.save_failures,
        )


Metadata = TypeVar("Metadata")
"""What the scheduler half of a connector tells its worker half, a type of its own."""


class ConnectorScheduler(ABC, Generic[Metadata]):
    """The half that decides; owned by the scheduler. No method waits, for a lock of a thread that does I/O either."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> int | None:
        """How many tokens behind those that are computed here can be loaded.

        Args: num_computed_tokens: a multiple of the block size.
        Returns: a multiple of the block size; None if that is not known yet: it is asked again, at the latest when
            `notify` was called.
        """

    @property
    def wants_loads(self) -> bool:
        """Whether anything can be loaded at all; if not, it need not be asked."""
        return True

    @abstractmethod
    def update_state_after_alloc(self, load: BlockLoad) -> None:
        """Blocks were found for what can be loaded, perhaps for fewer; the next metadata is to order it."""

    def save(self, saves: Sequence[BlockSave]) -> None:
        """These blocks are full: whoever wants them orders it in the next metadata, the others report them as saved.

        Only called if `wants_saves`.
        """

    @property
    def wants_saves(self) -> bool:
        """Whether full blocks are to be offered."""
        return False

    def announce(self, saves: Sequence[BlockSave]) -> None:
        """The step that comes with the next metadata fills these blocks, with tokens that are known, as prompts are.

        None of them may be kept yet, as the step may fail, or its sequence end before it has settled. Those that have
        settled are offered to `save` then, each as an equal object, unless they had to wait for long; of the others
        nothing more is heard. Each is announced once. Blocks that fill up with what a step samples or drafts never are.
        Only called if `wants_announcements`.
        """

    @property
    def wants_announcements(self) -> bool:
        """Whether blocks that a step fills are to be announced; needs `wants_saves`."""
        return False

    @property
    def load_timeout_s(self) -> float:
        """Nobody waits longer for a load; its blocks are left alone until it has ended."""
        return LOAD_TIMEOUT_S

    @abstractmethod
    def build_connector_meta(self) -> Metadata | None:
        """What the worker half is to do next; None for nothing. Forgets it."""

    def request_finished(self, request: KVRequest, block_ids: Sequence[int]) -> KVHandle | None:
        """A prompt is computed and another node goes on with it.

        Args: block_ids: those of `request.hashes`; they are held until the handle's lease is reported as released,
            or, without a lease, until they are saved.
        Returns: None if this connector cannot hand on.
        """
        return None

    def cancel(self, seq_id: int) -> None:
        """Nobody waits for a load any more; it is reported as loaded all the same, once its blocks are left alone."""


class ConnectorWorker(ABC, Generic[Metadata]):
    """The half that moves data; owned by the worker."""

    @abstractmethod
    def register_kv_caches(self, caches: KVCaches) -> None:
        """Use these blocks; once, before anything else."""

    @abstractmethod
    def start_load_kv(self, metadata: Metadata) -> None:
        """Begin what was ordered, without waiting for it; in front of a step's forward pass, or without one."""

    @property
    def is_layerwise(self) -> bool:
        """Whether `wait_for_layer_load` and `save_kv_layer` are called; asked for once, behind `register_kv_caches`.

        They are in steps that compute prompts, whether other rows decode in them or not, by the step thread, between
        `start_load_kv`, which is not called where there is no metadata, and `wait_for_save`. For each layer of the
        target once, in order: wait for 0, save 0, wait for 1, ... A step that fails leaves out the rest. Steps that
        only decode are not interrupted: on CUDA they are one graph. Networks that draft have no layers here.
        """
        return False

    def wait_for_layer_load(self, layer: int) -> None:
        """Return once a layer's blocks may be attended to, on CUDA by what is queued on the current stream next.

        Nothing by default, as loads end before rows are planned. What it raises fails the step.
        """

    def save_kv_layer(self, layer: int) -> None:
        """A layer of this step's tokens is in the cache: on CUDA, behind what is queued on the current stream.

        Returns without waiting for a copy, as the next layer does not begin before. What was announced for the step is
        not settled yet. What it raises is logged; the step's other layers are not offered then, and nothing is lost,
        as each block is still offered as a whole.
        """

    def wait_for_save(self) -> None:
        """The forward pass is queued; return once the blocks may be written to by the next one."""

    @abstractmethod
    def get_finished(self) -> Finished:
        """What has ended since the last call."""

    @abstractmethod
    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        """Blocks of the loads that `get_finished` reported last whose content is not what was asked for."""

    @abstractmethod
    def shutdown(self, timeout_s: float) -> None:
        """End all threads and transfers, saves within the time that is left; may be called twice."""


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """What a connector is built with.

    Attributes:
        name: of the connector, as in the configuration. engine_id: new with each start.
        notify: something has finished; from any thread.
        is_producer, is_consumer: whether KV may leave, and come in.
        kv_description: what the fingerprint follows from, see server.kv_description.
        clock: seconds, monotonic.
    """

    name: str
    engine_id: str
    block_size: int
    fingerprint: str
    notify: Callable[[], None]
    clock: Callable[[], float]
    is_producer: bool = True
    is_consumer: bool = True
    kv_description: str = ""


@dataclass(frozen=True, slots=True)
class Connector:
    """Both halves."""

    scheduler: ConnectorScheduler[Any]
    worker: ConnectorWorker[Any]
