"""Another node as this one's agent knows it."""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from connectors.nixl.agent import NixlAgent, PeerLost
from connectors.nixl.blocks import NixlBlocks
from connectors.nixl.memory import first_descriptors, strided
from connectors.nixl.peer import Greeting, PeerRefused
from connectors.nixl.staging import Lane, Staging
from connectors.peer.cut import Cut
from connectors.peer.layout import mismatch, shared_groups


class NixlSession:
    """From a greeting until a read has failed: then all that is known of the other agent is void.

    Attributes:
        theirs: the node. groups: places of the groups that are exchanged, here and there.
        is_broken: it is to be closed. is_unsafe: whether bytes still come to its memory is not known, so that lives as
            long as the agent. is_closed: the other agent is forgotten, and may be made known anew.
    """

    def __init__(
        self,
        agent: NixlAgent,
        nixl: Any,
        blocks: NixlBlocks,
        greeting: Greeting,
        *,
        num_lanes: int,
        staging_nbytes: int,
    ) -> None:
        """The agent's thread's. Raises: PeerRefused if their blocks are of no use; what NIXL raises."""
        reason = mismatch(blocks.layout, greeting.layout)
        if reason is not None:
            raise PeerRefused(reason)
        our_size, their_size = blocks.layout.block_size, greeting.layout.block_size
        ours, theirs = blocks.layout.target.block_nbytes, greeting.layout.target.block_nbytes
        if ours * their_size != theirs * our_size:
            raise PeerRefused(f"bytes of a block: {ours} for {our_size} tokens here, {theirs} for {their_size} there")
        self._agent = agent
        self.theirs = greeting
        self.groups = shared_groups(blocks.layout, greeting.layout)
        self._is_on_device = blocks.place.is_on_device or greeting.place.is_on_device
        self.is_broken = False
        self._reads: set[Future[None]] = set()
        self.is_unsafe = False
        self.is_closed = False
        self._closed_by: Any = None
        widths = [greeting.layout.groups[there].block_nbytes for _, there in self.groups]
        least = 1 if our_size == their_size else Cut.least(their_size, our_size)
        self.staging = Staging(widths, blocks.device, num_lanes=num_lanes, nbytes=staging_nbytes, least=least)
        self._remote_firsts = first_descriptors(greeting.regions)
        self._name = nixl.add_remote_agent(greeting.agent_metadata)
        place = self.staging.place
        memory = self.staging.memory
        self._registered = nixl.register_memory([(memory.data_ptr(), memory.numel(), place.device_id, "")], place.kind)
        self._local = nixl.prep_xfer_dlist("NIXL_INIT_AGENT", strided(self.staging.regions, place), place.kind)
        self._remote = nixl.prep_xfer_dlist(self._name, strided(greeting.regions, greeting.place), greeting.place.kind)

    @property
    def use_words(self) -> bool:
        """Which checksum; for XXH3, blocks on a device would have to be brought to the host."""
        return self._is_on_device

    def read(self, lane: Lane, block_ids: Sequence[int]) -> "Future[None]":
        """Read blocks of theirs, all groups of each; done when nothing is written to the lane any more."""
        local = [first + place for first in lane.descriptors for place in range(len(block_ids))]
        remote = [self._remote_firsts[there] + block_id for _, there in self.groups for block_id in block_ids]
        reading = self._agent.read(self._local, local, self._remote, remote)
        self._reads.add(reading)
        reading.add_done_callback(self._read_ended)
        return reading

    def _read_ended(self, reading: "Future[None]") -> None:
        error = reading.exception()
        self.is_broken = self.is_broken or error is not None
        if error is not None and not isinstance(error, PeerLost) and not self.is_unsafe:
            self.is_unsafe = True
            self._agent.keep(self.staging.memory)
        self._reads.discard(reading)
        self._free_if_unused()

    def close(self, nixl: Any) -> None:
        """Forget the other agent, as soon as nothing is written to the lanes; the agent's thread's."""
        self._closed_by = nixl
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        nixl = self._closed_by
        if nixl is None or self._reads:
            return
        self._closed_by, self.is_closed = None, True
        for prepared in (self._local, self._remote):
            with suppress(Exception):
                nixl.release_dlist_handle(prepared)
        with suppress(Exception):
            nixl.remove_remote_agent(self._name)
        with suppress(Exception):
            nixl.deregister_memory(self._registered)
