"""Which blocks of another node a load is made of, and where what comes is put."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from connectors.nixl_blocks import NixlBlocks
from connectors.nixl_peer import NixlPeer, PeerRefused
from connectors.nixl_session import NixlSession
from connectors.peer_cut import Cut
from connectors.peer_loading import Loading
from connectors.waiting import Waiting


@dataclass(frozen=True, slots=True)
class _Came:
    """Blocks that have come. Attributes, by group: content: [count, nbytes] uint8, valid where nothing is said of it.

    bad: places whose content is another one. absent: places that have none.
    """

    content: Sequence[Tensor]
    bad: Sequence[frozenset[int]]
    absent: Sequence[frozenset[int]]


class Pull:
    """One load, on the thread of that load. May be repeated with another session after it has failed."""

    def __init__(
        self, session: NixlSession, peer: NixlPeer, loading: Loading, blocks: NixlBlocks, waiting: Waiting
    ) -> None:
        self._session = session
        self._peer = peer
        self._loading = loading
        self._blocks = blocks
        self._waiting = waiting

    def run(self) -> None:
        """Bring in what the load still lacks. Raises: PeerRefused, NixlFailed, and see Waiting."""
        load, theirs = self._loading.load, self._session.theirs.layout
        if load.source.block_size != theirs.block_size:
            raise PeerRefused(f"block size: {load.source.block_size} by its handle, {theirs.block_size} by itself")
        if theirs.block_size == self._blocks.layout.block_size:
            self._pull_as_they_are()
        else:
            self._pull_and_cut(theirs.block_size)

    def _pull_as_they_are(self) -> None:
        load, done = self._loading.load, self._loading.num_done
        first = load.first_block + done
        block_ids = self._locate(first, len(load.block_ids) - done, load.hashes[-1])
        at_a_time = self._session.staging.blocks_per_lane
        lacks_groups = len(self._session.groups) < len(self._blocks.layout.groups)
        for start in range(0, len(block_ids), at_a_time):
            part = block_ids[start : start + at_a_time]
            own_ids = load.block_ids[done + start : done + start + len(part)]
            with self._reading(first + start, part) as came:
                for place, (own, _) in enumerate(self._session.groups):
                    unusable = came.bad[place] | came.absent[place]
                    self._store(own, own_ids, came.content[place], unusable)
            lacking = frozenset(range(len(part))) if lacks_groups else frozenset[int]().union(*came.absent, *came.bad)
            self._came(done + start, len(part), came.bad[0] | came.absent[0], lacking)

    def _pull_and_cut(self, their_size: int) -> None:
        load, layout = self._loading.load, self._session.theirs.layout
        our_size = self._blocks.layout.block_size
        while self._loading.num_done < len(load.block_ids):
            done = self._loading.num_done
            left = Cut(their_size, our_size, load.first_block + done, len(load.block_ids) - done)
            cut = left.fitting(self._session.staging.blocks_per_lane)
            block_ids = self._locate(cut.first, cut.count, b"")
            with self._reading(cut.first, block_ids) as came:
                blocks = came.content[0].view(getattr(torch, layout.target.dtype)).view(-1, *layout.target.shape)
                ours = cut.cut(blocks).flatten(1).view(torch.uint8)
                bad = cut.cut_from(came.bad[0] | came.absent[0])
                self._store(0, load.block_ids[done : done + cut.num_blocks], ours, bad)
            has_others = len(self._blocks.layout.groups) > 1
            self._came(done, cut.num_blocks, bad, range(cut.num_blocks) if has_others else ())

    def _locate(self, first: int, count: int, last_hash: bytes) -> list[int]:
        block_ids = self._peer.locate(self._loading.load.source.lease_id, first, count, last_hash, self._waiting)
        num_blocks = min(self._session.theirs.regions[there].num_blocks for _, there in self._session.groups)
        if max(block_ids) >= num_blocks:
            raise PeerRefused(f"it names block {max(block_ids)}, of {num_blocks}")
        return block_ids

    @contextmanager
    def _reading(self, first: int, block_ids: Sequence[int]) -> Iterator[_Came]:
        """Blocks of the lease, in memory that is this load's within the context; the lease held when all had come."""
        session, count = self._session, len(block_ids)
        lane = session.staging.take(self._waiting)
        reading = session.read(lane, block_ids)
        try:
            self._waiting.result(reading)
            checking = self._peer.start_check(
                self._loading.load.source.lease_id,
                first,
                count,
                [there for _, there in session.groups],
                session.use_words,
                self._waiting,
            )
            content = [part[:count] for part in lane.parts]
            found = [self._blocks.own_sums(part, session.use_words) for part in content]
            said = checking.sums(self._waiting)
            absent = [frozenset(place for place, value in enumerate(sums) if value is None) for sums in said]
            differ = [
                frozenset(place for place in range(count) if sums[place] != own[place])
                for sums, own in zip(said, found, strict=True)
            ]
            yield _Came(content, [places - none for places, none in zip(differ, absent, strict=True)], absent)
        finally:
            reading.add_done_callback(lambda _: session.staging.give_back(lane))

    def _store(self, group: int, block_ids: Sequence[int], content: Tensor, unusable: frozenset[int]) -> None:
        usable = [place for place in range(len(block_ids)) if place not in unusable]
        if unusable:
            content = content[usable]
        self._blocks.store(group, [block_ids[place] for place in usable], content)

    def _came(self, done: int, count: int, bad: Iterable[int], lacking: Iterable[int]) -> None:
        self._loading.came(done + count, [done + place for place in bad], [done + place for place in lacking])
