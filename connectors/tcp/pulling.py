"""Which blocks of another node a load is made of, and where what comes is put."""

from connectors.peer.loading import Loading
from connectors.tcp.blocks import LocalBlocks
from connectors.tcp.messages import Pull
from connectors.tcp.recut import Staging
from connectors.tcp.session import PeerRefused, Session


def pull_blocks(session: Session, loading: Loading, blocks: LocalBlocks) -> None:
    """Bring in what a load still lacks. May be called again, with another session, after it has failed.

    Raises: see Session.pull; PeerRefused if the node has blocks of another size than the handle says.
    """
    said, found = loading.load.source.block_size, session.theirs.block_size
    if said != found:
        raise PeerRefused(f"block size: {said} by its handle, {found} by itself")
    if found == blocks.layout.block_size:
        _pull_as_they_are(session, loading, blocks)
    else:
        _pull_and_cut(session, loading, blocks)


def _pull_as_they_are(session: Session, loading: Loading, blocks: LocalBlocks) -> None:
    load, done = loading.load, loading.num_done
    lacks_groups = len(session.groups) < len(blocks.layout.groups)
    pull = Pull(
        load.source.lease_id,
        load.first_block + done,
        len(load.block_ids) - done,
        sum(1 << there for _, there in session.groups),
        load.hashes[-1],
    )

    def came(count: int, bad: frozenset[int], lacking: frozenset[int]) -> None:
        everything = range(loading.num_done, done + count) if lacks_groups else ()
        loading.came(done + count, _moved(bad, done), [*everything, *_moved(lacking, done)])

    session.pull(
        pull,
        lambda segments: blocks.writing([(group, load.block_ids[done + at], part) for group, at, part in segments]),
        came,
        at_a_time=blocks.num_segments([own for own, _ in session.groups]),
        until_s=load.until_s,
    )


def _moved(places: frozenset[int], by: int) -> list[int]:
    return [place + by for place in places]


def _pull_and_cut(session: Session, loading: Loading, blocks: LocalBlocks) -> None:
    """Blocks of another size come into memory of their own, some at a time, and are cut anew there."""
    load, their_size = loading.load, session.theirs.block_size
    hashes = load.hashes_there(their_size)
    while loading.num_done < len(load.block_ids):
        done = loading.num_done
        staging = Staging(
            session.theirs.target,
            their_size,
            blocks.layout.block_size,
            load.first_block + done,
            len(load.block_ids) - done,
        )
        bad: set[int] = set()
        first, count = staging.cut.first, staging.cut.count

        def came(_: int, bad_places: frozenset[int], __: frozenset[int], bad: set[int] = bad) -> None:
            bad |= bad_places

        session.pull(
            Pull(load.source.lease_id, first, count, 1, hashes[first + count - 1]),
            staging.writing,
            came,
            at_a_time=blocks.num_segments([0]),
            until_s=load.until_s,
        )
        for place, block in enumerate(staging.ours()):
            blocks.fill(load.block_ids[done + place], block)
        end = done + staging.cut.num_blocks
        lacking = range(done, end) if len(blocks.layout.groups) > 1 else ()
        loading.came(end, _moved(staging.cut.cut_from(bad), done), lacking)
