"""Blocks: reuse order, sharing, and that no one is lost."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.kv.block_pool import NULL_BLOCK, BlockPool


def taken(pool: BlockPool, count: int) -> list[int]:
    block_ids = pool.allocate(count)
    assert block_ids is not None
    return block_ids


def test_null_block_is_never_given_out() -> None:
    pool = BlockPool(5)
    assert sorted(taken(pool, 4)) == [1, 2, 3, 4]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    assert NULL_BLOCK not in taken(BlockPool(2), 1)


def test_too_few_changes_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert len(taken(pool, 3)) == 3


def test_the_end_of_a_prefix_is_reused_first_and_the_oldest_sequence_before_newer_ones() -> None:
    pool = BlockPool(7)
    old, new = taken(pool, 3), taken(pool, 3)
    for i, block_id in enumerate([*old, *new]):
        pool.publish(block_id, b"%d" % i)
    pool.release(old)
    pool.release(new)
    assert [taken(pool, 1)[0] for _ in range(6)] == [*reversed(old), *reversed(new)]


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    pool = BlockPool(5)
    cached, scratch = taken(pool, 2), taken(pool, 2)
    for block_id in cached:
        pool.publish(block_id, b"%d" % block_id)
    pool.release(cached)
    pool.release(scratch)
    assert set(taken(pool, 2)) == set(scratch)
    assert all(pool.lookup(b"%d" % block_id) == block_id for block_id in cached)


def test_a_hit_takes_a_block_off_the_free_list_and_makes_it_young() -> None:
    pool = BlockPool(4)
    blocks = taken(pool, 3)
    for i, block_id in enumerate(blocks):
        pool.publish(block_id, b"%d" % i)
    pool.release(blocks)
    hit = pool.lookup(b"2")
    assert hit == blocks[2]
    pool.acquire([hit])
    assert (pool.num_free, pool.is_free(hit)) == (2, False)
    pool.acquire([hit])
    pool.release([hit])
    assert not pool.is_free(hit)
    pool.release([hit])
    assert [taken(pool, 1)[0] for _ in range(3)] == [blocks[1], blocks[0], blocks[2]]


def test_reuse_forgets_the_content() -> None:
    pool = BlockPool(2)
    (block,) = taken(pool, 1)
    pool.publish(block, b"x")
    pool.release([block])
    assert pool.lookup(b"x") == block
    assert taken(pool, 1) == [block]
    assert pool.lookup(b"x") is None


def test_the_first_of_two_equal_blocks_serves() -> None:
    pool = BlockPool(3)
    first, second = taken(pool, 2)
    pool.publish(first, b"x")
    pool.publish(second, b"x")
    assert pool.lookup(b"x") == first
    pool.publish(first, b"y")  # a block never changes its content while it is held
    assert pool.lookup(b"y") is None
    pool.release([second])
    assert taken(pool, 1) == [second]
    assert pool.lookup(b"x") == first
    pool.check_integrity()


def test_releasing_twice_is_a_bug() -> None:
    pool = BlockPool(3)
    (block,) = taken(pool, 1)
    pool.release([block])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block])


class PoolMachine(RuleBasedStateMachine):
    """Random holders against a model: who holds what, and what each hash must find."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.holders: list[list[int]] = []
        self.content: dict[bytes, int] = {}

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        block_ids = self.pool.allocate(count)
        held = {block_id for holder in self.holders for block_id in holder}
        if block_ids is None:
            assert count > 8 - len(held)
            return
        assert len(set(block_ids)) == count
        assert not held & set(block_ids)
        self.content = {digest: block for digest, block in self.content.items() if block not in block_ids}
        self.holders.append(block_ids)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.pool.release(holder)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), digest=st.binary(min_size=1, max_size=1))
    def publish(self, data: st.DataObject, digest: bytes) -> None:
        holder = data.draw(st.sampled_from([holder for holder in self.holders if holder]))
        block_id = data.draw(st.sampled_from(holder))
        self.pool.publish(block_id, digest)
        if block_id not in self.content.values():
            self.content.setdefault(digest, block_id)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_id = self.content[data.draw(st.sampled_from(sorted(self.content)))]
        self.pool.acquire([block_id])
        self.holders.append([block_id])

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        counts = Counter(block_id for holder in self.holders for block_id in holder)
        assert self.pool.num_free == 8 - len(counts)
        assert all(self.pool.is_free(block_id) == (block_id not in counts) for block_id in range(1, 9))
        assert all(self.pool.lookup(digest) == block_id for digest, block_id in self.content.items())


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase
