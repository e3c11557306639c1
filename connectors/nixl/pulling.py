"""Which blocks of another node a load is made of, and where what comes is put."""

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from connectors.nixl.blocks import NixlBlocks
from connectors.nixl.peer import NixlPeer, PeerRefused
from connectors.nixl.session import NixlSession
from connectors.nixl.staging import Lane
from connectors.peer.cut import Cut
from connectors.peer.loading import Loading
from connectors.waiting import Waiting


@dataclass(frozen=True, slots=True)
class _Part:
    """Blocks that are read at once. Attributes: first: among the lease's. block_ids: on the node that has them."""

    first: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Read:
    """A part under way to a lane. Attributes: ended: nothing is written to the lane any more."""

    part: _Part
    lane: Lane
    ended: "Future[None]"


@dataclass(frozen=True, slots=True)
class _Came:
    """A part that has come.

    Attributes, by group:
        content: [count, nbytes] uint8. bad: places where it is another one. absent: places that have none.
    """

    content: Sequence[Tensor]
    bad: Sequence[frozenset[int]]
    absent: Sequence[frozenset[int]]


class Pull:
    """One load, on the thread of that load."""

    def __init__(
        self, session: NixlSession, peer: NixlPeer, loading: Loading, blocks: NixlBlocks, waiting: Waiting
    ) -> None:
        self._session = session
        self._peer = peer
        self._loading = loading
        self._load = loading.load
        self._blocks = blocks
        self._waiting = waiting

    def run(self) -> None:
        """Bring it in. Raises: PeerRefused, NixlFailed, and see Waiting."""
        said, found = self._load.source.block_size, self._session.theirs.layout.block_size
        if said != found:
            raise PeerRefused(f"block size: {said} by its handle, {found} by itself")
        if found == self._blocks.layout.block_size:
            self._pull_as_they_are()
        else:
            self._pull_and_cut(found)

    def _pull_as_they_are(self) -> None:
        load, at_a_time = self._load, self._session.staging.blocks_per_lane
        located = self._locate(load.first_block, len(load.block_ids), load.hashes[-1])
        starts = range(0, len(located), at_a_time)
        parts = [_Part(load.first_block + start, located[start : start + at_a_time]) for start in starts]
        lacks_groups = len(self._session.groups) < len(self._blocks.layout.groups)
        with closing(self._read(parts)) as reads:
            for start, part, came in zip(starts, parts, reads, strict=True):
                count = len(part.block_ids)
                own_ids = load.block_ids[start : start + count]
                for place, (own, _) in enumerate(self._session.groups):
                    self._store(own, own_ids, came.content[place], came.bad[place] | came.absent[place])
                lacking = range(count) if lacks_groups else frozenset[int]().union(*came.absent, *came.bad)
                self._came(start, count, came.bad[0] | came.absent[0], lacking)

    def _pull_and_cut(self, their_size: int) -> None:
        load, target = self._load, self._session.theirs.layout.target
        left = Cut(their_size, self._blocks.layout.block_size, load.first_block, len(load.block_ids))
        last_hash = load.hashes_there(their_size)[left.first + left.count - 1]
        first, located = left.first, self._locate(left.first, left.count, last_hash)
        cuts: list[Cut] = []
        while left.num_blocks:
            cut = left.fitting(self._session.staging.blocks_per_lane)
            left = Cut(cut.their_size, cut.our_size, cut.first_block + cut.num_blocks, left.num_blocks - cut.num_blocks)
            cuts.append(cut)
        parts = [_Part(cut.first, located[cut.first - first : cut.first - first + cut.count]) for cut in cuts]
        has_other_groups = len(self._blocks.layout.groups) > 1
        with closing(self._read(parts)) as reads:
            for cut, came in zip(cuts, reads, strict=True):
                theirs = came.content[0].view(getattr(torch, target.dtype)).view(-1, *target.shape)
                ours = cut.cut(theirs).flatten(1).view(torch.uint8)
                bad = cut.cut_from(came.bad[0] | came.absent[0])
                start = cut.first_block - load.first_block
                self._store(0, load.block_ids[start : start + cut.num_blocks], ours, bad)
                self._came(start, cut.num_blocks, bad, range(cut.num_blocks) if has_other_groups else ())

    def _locate(self, first: int, count: int, last_hash: bytes) -> list[int]:
        block_ids = self._peer.locate(self._load.source.lease_id, first, count, last_hash, self._waiting)
        num_blocks = min(self._session.theirs.regions[there].num_blocks for _, there in self._session.groups)
        if max(block_ids) >= num_blocks:
            raise PeerRefused(f"it names block {max(block_ids)}, of {num_blocks}")
        return block_ids

    def _read(self, parts: Iterable[_Part]) -> Generator[_Came, None, None]:
        """Each of them; the next one is read while one is checked and stored, if there is memory for both.

        What is given is valid until the next one is asked for.
        """
        staging, left, reads = self._session.staging, deque(parts), deque[_Read]()
        try:
            while left or reads:
                if not reads:
                    reads.append(self._begin(left.popleft(), staging.take(self._waiting)))
                lane = staging.take_nowait() if left else None  # to wait with one in hand could be a deadlock
                if lane is not None:
                    reads.append(self._begin(left.popleft(), lane))
                yield self._check(reads[0])
                self._give_back(reads.popleft())
        finally:
            for read in reads:
                self._give_back(read)

    def _begin(self, part: _Part, lane: Lane) -> _Read:
        return _Read(part, lane, self._session.read(lane, part.block_ids))

    def _check(self, read: _Read) -> _Came:
        """Wait for it. The lease has held when all had come."""
        self._waiting.result(read.ended)
        count, use_words = len(read.part.block_ids), self._session.use_words
        checking = self._peer.start_check(
            self._load.source.lease_id,
            read.part.first,
            count,
            [there for _, there in self._session.groups],
            use_words,
            self._waiting,
        )
        content = [rows[:count] for rows in read.lane.parts]
        found = [self._blocks.own_sums(rows, use_words) for rows in content]
        bad, absent = list[frozenset[int]](), list[frozenset[int]]()
        for said, own in zip(checking.sums(self._waiting), found, strict=True):
            absent.append(frozenset(place for place in range(count) if said[place] is None))
            bad.append(frozenset(place for place in range(count) if said[place] not in (None, own[place])))
        return _Came(content, bad, absent)

    def _give_back(self, read: _Read) -> None:
        """Its lane, once nothing is written to it any more."""
        read.ended.add_done_callback(lambda _: self._session.staging.give_back(read.lane))

    def _store(self, group: int, block_ids: Sequence[int], content: Tensor, unusable: frozenset[int]) -> None:
        usable = [place for place in range(len(block_ids)) if place not in unusable]
        if unusable:
            content = content[usable]
        if usable:
            self._blocks.store(group, [block_ids[place] for place in usable], content)

    def _came(self, done: int, count: int, bad: Iterable[int], lacking: Iterable[int]) -> None:
        self._loading.came(done + count, [done + place for place in bad], [done + place for place in lacking])
