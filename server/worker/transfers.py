"""The worker's view of a connector: what it is told before a step, and what it has done since."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from connectors.base import ConnectorWorker, Finished, KVCaches, KVGroup, TransferPlan
from proposers.network import Follower
from server.model.layer_hooks import LayerHooks

logger = logging.getLogger(__name__)


class Transfers:
    """The worker half of a connector, with everything that is kept for a block; owned by the runner."""

    def __init__(
        self,
        connector: ConnectorWorker[Any],
        model: nn.Module,
        kv: Tensor,
        fingerprint: str,
        followers: Sequence[Follower],
    ) -> None:
        """Args:
        model: the target's decoder. kv: its own, see kv_tensors.allocate_kv. fingerprint: of that, hex.
        """
        self._connector = connector
        self._followers = followers
        groups = [KVGroup("target", fingerprint, kv)]
        groups += [group for follower in followers for group in follower.kv_groups()]
        connector.register_kv_caches(KVCaches(tuple(groups), block_size=kv.shape[3]))
        self._hooks = LayerHooks(model, kv.shape[1]) if connector.is_layerwise else None
        self._can_save_layers = True

    @contextmanager
    def step(self, transfers: TransferPlan | None) -> Iterator[None]:
        """Around a forward pass: begin what was ordered in front of it, and have its blocks free behind it."""
        self.begin(transfers)
        try:
            yield
        finally:
            self._connector.wait_for_save()

    def begin(self, transfers: TransferPlan | None) -> None:
        """Begin what was ordered, whether a step follows or not."""
        if transfers is None:
            return
        for follower in self._followers:
            follower.void(transfers.filled_blocks)
        self._connector.start_load_kv(transfers.metadata)

    def between_layers(self) -> AbstractContextManager[None]:
        """Around the target's forward pass in a step that computes prompts: calls a connector that asks for it."""
        if self._hooks is None:
            return nullcontext()
        self._can_save_layers = True
        return self._hooks.calling(self._connector.wait_for_layer_load, self._save_layer)

    def _save_layer(self, layer: int) -> None:
        """Offer a layer, unless one before it went wrong: blocks are saved behind their step all the same."""
        if not self._can_save_layers:
            return
        try:
            self._connector.save_kv_layer(layer)
        except Exception:
            self._can_save_layers = False
            logger.exception("saving layer %d failed; the step goes on without", layer)

    def poll(self) -> tuple[Finished, frozenset[int]]:
        """What has ended since the last call, and the blocks among it that were not loaded."""
        finished = self._connector.get_finished()
        if not finished:
            return finished, frozenset()
        for follower in self._followers:
            follower.adopt(finished.complete)
        return finished, self._connector.get_block_ids_with_load_errors()
