"""The blocks of a node as a connection reads and writes them."""

import pytest
import torch

from connectors.base import KVCaches, KVGroup
from connectors.tcp.blocks import LocalBlocks
from connectors.tcp.messages import MAX_SEGMENTS
from connectors.tcp.parts import CHUNK_NBYTES, part_of, slots


def caches(blocks: torch.Tensor) -> KVCaches:
    return KVCaches(
        (
            KVGroup("target", "f", blocks),
            KVGroup("draft", "d", torch.ones(len(blocks), 3), lambda block_id: block_id > 0),
        ),
        4,
    )


@pytest.mark.parametrize("is_strided", [False, True])
def test_bytes_are_those_of_the_blocks(is_strided: bool) -> None:
    both = torch.randn(5, 2, 1, 1, 4, 6)
    blocks = both[:, 1] if is_strided else both[:, 1].contiguous()
    local = LocalBlocks(caches(blocks))
    with local.reading([(0, 3, 0), (1, 0, 0), (1, 2, 0)]) as (block, absent, draft):
        assert bytes(block or b"") == blocks[3].contiguous().numpy().tobytes()
        assert absent is None
        assert bytes(draft or b"") == torch.ones(3).numpy().tobytes()
    untouched = both[:, 0].clone()
    with local.writing([(0, 1, 0), (0, 4, 0)]) as buffers:
        for buffer in buffers:
            buffer[:] = blocks[3].contiguous().numpy().tobytes()
    assert torch.equal(blocks[1], blocks[3])
    assert torch.equal(blocks[4], blocks[3])
    assert torch.equal(both[:, 0], untouched)


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(2 * CHUNK_NBYTES, 1), (CHUNK_NBYTES, 1), (CHUNK_NBYTES // 4, 4), (CHUNK_NBYTES // 4 + 16, 3), (16, MAX_SEGMENTS)],
)
def test_a_chunk_is_as_many_blocks_as_fit(nbytes: int, expected: int) -> None:
    assert LocalBlocks(caches(torch.zeros(1, 1, 1, 4, nbytes // 16))).num_segments([0]) == expected


@pytest.mark.parametrize("nbytes", [64, CHUNK_NBYTES, CHUNK_NBYTES + 64, 3 * CHUNK_NBYTES])
def test_the_parts_of_a_block_are_all_of_it(nbytes: int) -> None:
    local = LocalBlocks(caches(torch.randn(2, 1, 1, 4, nbytes // 16)))
    order = slots(local.layout, [0, 1])
    assert order == [*((0, part) for part in range(-(-nbytes // CHUNK_NBYTES))), (1, 0)]
    segments = [(group, 1, part) for group, part in order]
    with local.reading(segments) as parts:
        assert all(part is not None and part.nbytes <= CHUNK_NBYTES for part in parts)
        assert b"".join(bytes(part or b"") for part in parts[:-1]) == local_bytes(local, 1)
    assert part_of(nbytes, order[-2][1]).stop == nbytes


def local_bytes(local: LocalBlocks, block_id: int) -> bytes:
    """Of the target's block, by another way."""
    with local._blocks[0].reading(block_id) as whole:
        return bytes(whole)
