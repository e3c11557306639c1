"""Blocks in memory, against a list of what was used when."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from connectors.memory import MemoryConfig, MemoryStore
from connectors.save_failure import SaveFailure
from tests.fakes.store_blocks import BLOCK_NBYTES, NAMESPACE, block_hash, content, has, load, save

MAX_BYTES = 1000
NAMESPACES = ("one", "two")
NUMBERS = st.integers(0, 5)


def size_of(namespace: str) -> int:
    """All blocks of a namespace have the same."""
    return {"one": 150, "two": 330}[namespace]


class AgainstAList(RuleBasedStateMachine):
    """The list has the keys in the order of their last use."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(MAX_BYTES)
        self.used: list[tuple[str, int]] = []

    @rule(namespace=st.sampled_from(NAMESPACES), number=NUMBERS)
    def save(self, namespace: str, number: int) -> None:
        assert self.store.save(namespace, block_hash(number), memoryview(content(number, size_of(namespace)))) is None
        key = (namespace, number)
        if key in self.used:
            self.used.remove(key)
        self.used.append(key)
        while self.nbytes() > MAX_BYTES:
            self.used.pop(0)

    @rule(namespace=st.sampled_from(NAMESPACES), numbers=st.lists(NUMBERS, unique=True))
    def find(self, namespace: str, numbers: list[int]) -> None:
        count = self.store.find(namespace, [block_hash(number) for number in numbers])
        found = [(namespace, number) for number in numbers[:count]]
        assert all(key in self.used for key in found)
        assert count == len(numbers) or (namespace, numbers[count]) not in self.used
        self.used = [key for key in self.used if key not in found] + found[::-1]

    @rule(namespace=st.sampled_from(NAMESPACES), number=NUMBERS)
    def load(self, namespace: str, number: int) -> None:
        buffer = bytearray(size_of(namespace))
        is_there = self.store.load(namespace, block_hash(number), memoryview(buffer))
        assert is_there == ((namespace, number) in self.used)
        assert not is_there or buffer == content(number, size_of(namespace))

    @rule()
    def save_what_never_fits(self) -> None:
        failure = self.store.save("large", block_hash(0), memoryview(bytes(MAX_BYTES + 1)))
        assert failure is SaveFailure.FULL
        assert self.store.find("large", [block_hash(0)]) == 0

    @invariant()
    def is_within_its_budget(self) -> None:
        assert self.nbytes() <= MAX_BYTES

    def nbytes(self) -> int:
        return sum(size_of(namespace) for namespace, _ in self.used)


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=60, stateful_step_count=30)


def test_threads_keep_to_the_budget() -> None:
    """What is being copied counts: so the room is never exceeded, and all of it can be used afterwards."""
    room = 4
    store = MemoryStore(room * BLOCK_NBYTES)

    def work(number: int) -> bool:
        save(store, number % 7)
        return load(store, number % 7) in (None, content(number % 7))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(300)))
    for number in range(10, 10 + room):
        save(store, number)
    assert [has(store, number) for number in range(10, 10 + room)] == [True] * room


def test_the_first_block_of_a_prompt_outlives_the_others() -> None:
    store = MemoryStore(3 * BLOCK_NBYTES)
    for number in range(3):
        save(store, number)
    assert store.find(NAMESPACE, [block_hash(number) for number in range(3)]) == 3
    save(store, 8)
    save(store, 9)
    assert [has(store, number) for number in (0, 1, 2)] == [True, False, False]


def test_a_block_of_another_size_is_a_miss() -> None:
    store = MemoryStore(MAX_BYTES)
    store.save(NAMESPACE, block_hash(0), memoryview(b"12"))
    assert not store.load(NAMESPACE, block_hash(0), memoryview(bytearray(3)))


def test_what_is_kept_is_a_copy() -> None:
    store = MemoryStore(MAX_BYTES)
    block = bytearray(b"before")
    store.save(NAMESPACE, block_hash(0), memoryview(block))
    block[:] = b"behind"
    buffer = bytearray(6)
    assert store.load(NAMESPACE, block_hash(0), memoryview(buffer))
    assert buffer == b"before"


def test_nothing_is_left_of_a_closed_one() -> None:
    store = MemoryConfig(max_bytes=2 * BLOCK_NBYTES).open_store()
    save(store, 1)
    store.close()
    assert not has(store, 1)


@pytest.mark.parametrize("given", ["1 KiB", 1024])
def test_the_budget_is_a_size(given: object) -> None:
    assert MemoryConfig.model_validate({"max_bytes": given}).max_bytes == 1024
