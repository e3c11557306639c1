"""A connector as another distribution would bring it, which keeps prompts layer by layer while they are computed."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

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
from connectors.misfit import misfit
from connectors.threads import Threads
from server.kv_handle import KVHandle

logger = logging.getLogger(__name__)


class LayerFilesConfig(ConnectorConfig):
    """Settings of blocks in files, which are written by layers."""

    folder: str = Field(min_length=1, description="where the files are")

    def build(self, context: ConnectorContext) -> Connector:
        """Both halves."""
        folder, looking = Path(self.folder), Threads("layer-files", 1)
        return Connector(LayerFilesScheduler(folder, context, looking), LayerFilesWorker(folder, looking))


@dataclass
class Orders:
    """What is to be done next."""

    loads: list[BlockLoad] = field(default_factory=list)
    saves: list[BlockSave] = field(default_factory=list)
    announced: list[BlockSave] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)


class LayerFilesScheduler(ConnectorScheduler[Orders]):
    """Has a thread look for files, from the first block on, as often as it is asked anew."""

    def __init__(self, folder: Path, context: ConnectorContext, looking: Threads) -> None:
        self._folder = folder
        self._context = context
        self._looking = looking
        self._found: dict[int, list[int]] = {}
        self._orders = Orders()

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> int | None:
        if not self._context.is_consumer:
            return 0
        found = self._found.get(request.seq_id)
        if found is None:
            if request.source is not None and (reason := misfit(request.source, self._context)) is not None:
                logger.warning("the KV of request %s is not that of this node: %s", request.request_id, reason)
            found = self._found[request.seq_id] = []
            self._looking.submit(partial(self._look, found, request.hashes))
        if not found:
            return None
        del self._found[request.seq_id]
        return max(0, found[0] * self._context.block_size - num_computed_tokens)

    def _look(self, found: list[int], hashes: Sequence[bytes]) -> None:
        is_there = [(self._folder / f"{self._context.fingerprint}-{digest.hex()}").exists() for digest in hashes]
        found.append([*is_there, False].index(False))
        self._context.notify()

    def cancel(self, seq_id: int) -> None:
        self._found.pop(seq_id, None)

    def update_state_after_alloc(self, load: BlockLoad) -> None:
        self._orders.loads.append(load)

    @property
    def wants_saves(self) -> bool:
        return self._context.is_producer

    def save(self, saves: Sequence[BlockSave]) -> None:
        self._orders.saves += saves

    @property
    def wants_announcements(self) -> bool:
        return self._context.is_producer

    def announce(self, saves: Sequence[BlockSave]) -> None:
        self._orders.announced += saves

    def build_connector_meta(self) -> Orders | None:
        orders, self._orders = self._orders, Orders()
        return orders if orders != Orders() else None

    def request_finished(self, request: KVRequest, block_ids: Sequence[int]) -> KVHandle | None:
        own, num_tokens = self._context, len(block_ids) * self._context.block_size
        if not own.is_producer:
            return None
        return KVHandle(
            own.name, own.engine_id, "", "", num_tokens, (), own.block_size, own.fingerprint, own.kv_description
        )


class LayerFilesWorker(ConnectorWorker[Orders]):
    """Writes and reads on the step thread. What is announced has a file of its own until it is offered.

    Attributes: num_early: blocks whose layers were all written by the time that they were offered.
    """

    is_layerwise = True

    def __init__(self, folder: Path, looking: Threads) -> None:
        """Args: looking: ended with this."""
        self._folder = folder
        self._looking = looking
        self._announced: list[BlockSave] = []
        self._layers: dict[BlockSave, list[bytes]] = {}
        self._finished, self._bad = Finished(), frozenset[int]()
        self.num_early = 0

    def register_kv_caches(self, caches: KVCaches) -> None:
        self._name = caches.target.fingerprint
        self._target, *others = [group.blocks for group in caches.groups]
        self._others = others

    def start_load_kv(self, metadata: Orders) -> None:
        for load in metadata.loads:
            self._load(load)
        for save in metadata.saves:
            self._save(save)
        self._announced = metadata.announced

    def _load(self, load: BlockLoad) -> None:
        num_good = 0
        for block_id, block_hash in zip(load.block_ids, load.hashes, strict=True):
            parts = [blocks[block_id].flatten().view(torch.uint8) for blocks in (self._target, *self._others)]
            try:
                data = bytearray(self._path(block_hash).read_bytes())
            except OSError:
                break
            content = torch.frombuffer(data, dtype=torch.uint8).split([part.nbytes for part in parts])
            for part, own in zip(parts, content, strict=True):
                part.copy_(own)
            num_good += 1
        good, bad = load.block_ids[:num_good], load.block_ids[num_good:]
        self._finished = self._finished.joined(Finished(loaded=(load.seq_id,), complete=good))
        self._bad |= set(bad)

    def _save(self, save: BlockSave) -> None:
        layers = self._layers.pop(save, [])
        if len(layers) == self._target.shape[1]:
            self.num_early += 1
        else:
            layers = [_bytes(self._target[save.block_id])]
        others = [_bytes(blocks[save.block_id]) for blocks in self._others]
        self._path(save.block_hash).write_bytes(b"".join([*layers, *others]))
        self._finished = self._finished.joined(Finished(saved=(save.block_id,)))

    def save_kv_layer(self, layer: int) -> None:
        for save in self._announced:
            self._layers.setdefault(save, []).append(_bytes(self._target[save.block_id, layer]))

    def wait_for_save(self) -> None:
        self._announced = []

    def get_finished(self) -> Finished:
        finished, self._finished = self._finished, Finished()
        self._errors, self._bad = self._bad, frozenset()
        return finished

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        return self._errors

    def shutdown(self, timeout_s: float) -> None:
        """Only the thread that looks for files is to end."""
        self._looking.end(timeout_s)

    def _path(self, block_hash: bytes) -> Path:
        return self._folder / f"{self._name}-{block_hash.hex()}"


def _bytes(part: Tensor) -> bytes:
    """Once the device has computed them."""
    return part.cpu().view(torch.uint8).numpy().tobytes()
