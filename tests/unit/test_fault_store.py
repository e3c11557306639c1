"""A store that fails at given rates."""

import threading
from typing import Any

import pytest

from connectors.fault import FaultConfig
from connectors.save_failure import SaveFailure
from connectors.store import BlockStore
from tests.fakes.store_blocks import BLOCK_NBYTES, NAMESPACE, block_hash, content, has, load, save

NUM_BLOCKS = 1000
SMALL = 8


def faulty(**settings: Any) -> BlockStore:
    return FaultConfig.model_validate({"store": {"kv_connector": "memory"}, **settings}).open_store()


def fill(store: BlockStore) -> list[SaveFailure | None]:
    return [store.save(NAMESPACE, block_hash(i), memoryview(content(i, SMALL))) for i in range(NUM_BLOCKS)]


def loads(store: BlockStore) -> list[bool]:
    return [store.load(NAMESPACE, block_hash(i), memoryview(bytearray(SMALL))) for i in range(NUM_BLOCKS)]


def test_without_rates_it_is_the_store() -> None:
    store = faulty()
    save(store, 1)
    assert (has(store, 1), has(store, 2), load(store, 1), load(store, 2)) == (True, False, content(1), None)


def test_a_share_of_loads_fails_the_same_with_each_seed() -> None:
    outcomes = []
    for seed in (0, 0, 1):
        store = faulty(load_failure_rate=0.2, seed=seed)
        fill(store)
        outcomes.append(loads(store))
    assert outcomes[0] == outcomes[1] != outcomes[2]
    assert outcomes[0].count(False) == pytest.approx(0.2 * NUM_BLOCKS, rel=0.25)


def test_a_failed_load_leaves_other_bytes_behind() -> None:
    store = faulty(load_failure_rate=1)
    save(store, 1)
    buffer = bytearray(BLOCK_NBYTES)
    assert not store.load(NAMESPACE, block_hash(1), memoryview(buffer))
    right = content(1)
    half = BLOCK_NBYTES // 2
    assert all(ours != theirs for ours, theirs in zip(buffer[:half], right[:half], strict=True))
    assert buffer[half:] == right[half:]


def test_a_share_of_saves_is_not_kept() -> None:
    store = faulty(save_failure_rate=0.5)
    failures = fill(store)
    kept = loads(store)
    assert kept.count(False) == pytest.approx(0.5 * NUM_BLOCKS, rel=0.2)
    assert failures == [None if is_kept else SaveFailure.UNAVAILABLE for is_kept in kept]


def test_a_share_of_look_ups_finds_too_little() -> None:
    store = faulty(find_failure_rate=0.5)
    fill(store)
    hashes = [block_hash(number) for number in range(10)]
    counts = [store.find(NAMESPACE, hashes) for _ in range(NUM_BLOCKS)]
    assert counts.count(10) == pytest.approx(0.5 * NUM_BLOCKS, rel=0.2)
    assert set(counts) == set(range(11))


def test_closing_ends_a_delay() -> None:
    """A block is as good as never loaded, until then."""
    store = faulty(max_delay_seconds=3600)
    waiting = threading.Thread(target=loads, args=(store,))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    store.close()
    waiting.join(30)
    assert not waiting.is_alive()
