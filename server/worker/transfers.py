"""The worker's view of a connector: what it is told before a step, and what it has done since."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from connectors.base import ConnectorWorker, Finished, KVCaches, KVGroup, TransferPlan
from proposers.network import Follower


class Transfers:
    """The worker half of a connector, with everything that is kept for a block; owned by the runner."""

    def __init__(
        self, connector: ConnectorWorker[Any], kv: Tensor, fingerprint: str, followers: Sequence[Follower]
    ) -> None:
        """Args: kv: the target's, see kv_tensors.allocate_kv. fingerprint: of it, hex."""
        self._connector = connector
        self._followers = followers
        groups = [KVGroup("target", fingerprint, kv)]
        groups += [group for follower in followers for group in follower.kv_groups()]
        connector.register_kv_caches(KVCaches(tuple(groups), block_size=kv.shape[3]))

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

    def poll(self) -> tuple[Finished, frozenset[int]]:
        """What has ended since the last call, and the blocks among it that were not loaded."""
        finished = self._connector.get_finished()
        if not finished:
            return finished, frozenset()
        for follower in self._followers:
            follower.adopt(finished.complete)
        return finished, self._connector.get_block_ids_with_load_errors()
