"""A connector on a store: what it finds, loads and saves, and what a store that hangs or fails does to it."""

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch

from connectors.base import BlockLoad, BlockSave, ConnectorContext, Finished, KVCaches, KVGroup, KVRequest
from connectors.content.connector import content_connector
from connectors.content.groups import namespace
from connectors.content.patience import PAUSE_S, STORE_TIMEOUT_S
from connectors.content.scheduler import ContentScheduler
from connectors.content.worker import NUM_THREADS, ContentWorker
from connectors.save_failure import SaveFailure
from server.kv_handle import KVHandle
from tests.fakes.core import Clock
from tests.fakes.gated_store import TIMEOUT_S, GatedStore
from tests.fakes.store_blocks import block_hash

BLOCK_SIZE = 4
NUM_BLOCKS = 24
HASHES = [block_hash(i) for i in range(12)]
TARGET = f"f1-target-{BLOCK_SIZE}"


class Node:
    """Both halves on a gated store, with blocks of a target and a draft model."""

    def __init__(self, *, is_producer: bool = True, is_consumer: bool = True, layerwise: bool = False) -> None:
        self.store, self.clock = GatedStore(), Clock()
        self.notified = threading.Semaphore(0)
        context = ConnectorContext(
            "fake",
            "e1",
            BLOCK_SIZE,
            "f1",
            self.notified.release,
            self.clock,
            is_producer,
            is_consumer,
            "layers=4 dtype=bfloat16",
        )
        connector = content_connector(self.store, context, layerwise=layerwise)
        assert isinstance(connector.scheduler, ContentScheduler)
        assert isinstance(connector.worker, ContentWorker)
        self.scheduler, self.worker = connector.scheduler, connector.worker
        self.target = torch.zeros(NUM_BLOCKS, 2, 1, BLOCK_SIZE, 2)
        self.draft = torch.zeros(NUM_BLOCKS, 3)
        self.whole: set[int] = set(range(NUM_BLOCKS))
        self.groups = (
            KVGroup("target", "f1", self.target),
            KVGroup("draft", "d1", self.draft, self.whole.__contains__),
        )
        self.worker.register_kv_caches(KVCaches(self.groups, BLOCK_SIZE))

    def keep(self, numbers: range, *, drafts: bool = True) -> None:
        """Have the store hold blocks: full of their number."""
        for group in self.groups if drafts else self.groups[:1]:
            for number in numbers:
                data = torch.full_like(group.blocks[0], number).numpy().tobytes()
                self.store.blocks[namespace(group.name, group.fingerprint, BLOCK_SIZE), HASHES[number]] = data

    def ask(self, request: KVRequest, num_computed_blocks: int = 0) -> int | None:
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_blocks * BLOCK_SIZE)

    def found(self, request: KVRequest, num_computed_blocks: int = 0) -> int:
        """Ask, wait, and ask again. Returns: blocks."""
        assert self.ask(request, num_computed_blocks) is None
        self.wait()
        answer = self.ask(request, num_computed_blocks)
        assert answer is not None
        return answer // BLOCK_SIZE

    def wait(self) -> None:
        """Until something has finished."""
        assert self.notified.acquire(timeout=TIMEOUT_S)

    def step(self) -> Finished:
        """Between two steps of an engine."""
        if (metadata := self.scheduler.build_connector_meta()) is not None:
            self.worker.start_load_kv(metadata)
        return self.worker.get_finished()

    def load(self, seq_id: int, block_ids: range) -> None:
        """Order the first blocks."""
        hashes = tuple(HASHES[: len(block_ids)])
        self.scheduler.update_state_after_alloc(BlockLoad(seq_id, tuple(block_ids), hashes))
        self.step()


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.store.open()
    node.worker.shutdown(TIMEOUT_S)


def request(seq_id: int, num_blocks: int = 6) -> KVRequest:
    return KVRequest(seq_id, f"r{seq_id}", num_blocks * BLOCK_SIZE + 1, HASHES[:num_blocks])


def test_finds_what_is_there_behind_what_is_computed(node: Node) -> None:
    node.keep(range(4))
    assert node.found(request(1)) == 4
    assert node.found(request(2), 1) == 3
    assert node.store.asked == [tuple(HASHES[:6]), tuple(HASHES[1:6])]
    assert node.ask(request(3), 6) == 0, "nothing is missing"


def test_more_or_less_is_here_by_the_time_of_the_answer(node: Node) -> None:
    node.keep(range(2, 5))
    assert node.ask(request(1), 2) is None
    node.wait()
    assert node.ask(request(1), 3) == 2 * BLOCK_SIZE
    assert node.ask(request(2), 2) is None
    node.wait()
    assert node.ask(request(2), 1) is None, "block 1 was not asked for"
    node.wait()
    assert node.ask(request(2), 1) == 0, "and is not there"


def test_what_another_node_promised_and_is_not_there_is_told(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    def promised(seq_id: int, connector: str) -> KVRequest:
        handle = KVHandle(connector, "e2", "", "", 4 * BLOCK_SIZE, (), BLOCK_SIZE, "f1")
        return replace(request(seq_id), source=handle)

    assert node.found(request(1)) == node.found(promised(2, "other")) == node.found(promised(3, "fake"), 4) == 0
    node.keep(range(1))
    assert node.found(promised(4, "fake")) == 1
    assert not caplog.records
    assert node.found(promised(5, "fake"), 1) == 0
    assert "request r5 is computed here: none of its KV is in the fake store of this node" in caplog.text


@pytest.mark.parametrize(
    ("handle", "reason"),
    [
        ({"fingerprint": "g1", "description": "layers=3 dtype=bfloat16"}, "layers 3 there, 4 here"),
        ({"fingerprint": "g1"}, "fingerprint g1 there, f1 here"),
        ({"block_size": 8}, "blocks of 8 tokens there, of 4 here"),
    ],
)
def test_what_can_not_be_there_is_told_with_both_values(
    node: Node, caplog: pytest.LogCaptureFixture, handle: dict[str, Any], reason: str
) -> None:
    source = replace(KVHandle("fake", "e2", "", "", 4 * BLOCK_SIZE, (), BLOCK_SIZE, "f1"), **handle)
    assert node.found(replace(request(1), source=source)) == 0
    assert caplog.messages[-1].endswith(
        f"none of its KV is in the fake store of this node, and would not fit: {reason}"
    )


def test_a_node_that_only_saves_asks_for_nothing() -> None:
    node = Node(is_consumer=False)
    assert not node.scheduler.wants_loads
    assert node.ask(request(1)) == 0
    assert not node.store.asked


def test_a_store_that_hangs_is_waited_for_and_then_left_alone(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.keep(range(4))
    node.store.finding.clear()
    assert node.ask(request(1)) is None
    assert node.store.begun.acquire(timeout=TIMEOUT_S)
    node.clock.now_s = 1.5
    assert node.ask(request(2)) is None
    node.clock.now_s = STORE_TIMEOUT_S - 0.01
    assert node.ask(request(1)) is None
    with caplog.at_level(logging.WARNING):
        node.clock.now_s = STORE_TIMEOUT_S
        assert node.ask(request(1)) == 0
        assert node.ask(request(2)) == 0, "it waits no longer than who was there before it"
        assert node.ask(request(3)) == 0
    assert len(caplog.records) == 1
    node.store.finding.set()
    node.wait()
    node.clock.now_s += PAUSE_S
    assert node.found(request(4)) == 4
    assert len(node.store.asked) == 2, "nobody waits for what the second sequence had asked"


def test_answers_take_less_than_a_millisecond_while_the_store_hangs(node: Node) -> None:
    node.store.finding.clear()
    durations = []
    for seq_id in range(200):
        start_s = time.perf_counter()
        assert node.ask(request(seq_id)) is None
        durations.append(time.perf_counter() - start_s)
    assert median(durations) < 1e-3


def test_what_a_store_raises_is_nothing_found(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.store.breaks = True
    with caplog.at_level(logging.CRITICAL):
        assert node.found(request(1)) == 0


def test_loads_all_groups_as_far_as_they_are_there(node: Node) -> None:
    node.keep(range(3), drafts=False)
    node.keep(range(2))
    node.load(7, range(10, 15))
    node.wait()
    assert node.worker.get_finished() == Finished(loaded=(7,), complete=(10, 11))
    assert node.worker.get_block_ids_with_load_errors() == {13, 14}
    assert [int(block.max()) for block in node.target[10:13]] == [0, 1, 2]
    assert node.store.loaded.count(HASHES[4]) == 0, "what is behind a missing block is of no use"
    assert node.worker.get_finished() == Finished()
    assert node.worker.get_block_ids_with_load_errors() == frozenset()


def test_a_load_that_raises_has_brought_nothing(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.keep(range(3))
    node.store.breaks = True
    with caplog.at_level(logging.CRITICAL):
        node.load(7, range(10, 13))
        node.wait()
    assert node.worker.get_finished() == Finished(loaded=(7,))
    assert node.worker.get_block_ids_with_load_errors() == {10, 11, 12}


def test_a_load_that_is_cancelled_before_its_turn_ends_at_once(node: Node) -> None:
    node.keep(range(3))
    node.store.loading.clear()
    for seq_id in range(NUM_THREADS):
        node.load(seq_id, range(1 + seq_id, 2 + seq_id))
        assert node.store.begun.acquire(timeout=TIMEOUT_S)
    node.load(9, range(10, 13))
    node.scheduler.cancel(9)
    assert node.step() == Finished(loaded=(9,))
    assert node.worker.get_block_ids_with_load_errors() == {10, 11, 12}
    node.store.loading.set()
    node.worker.shutdown(TIMEOUT_S)
    assert sorted(node.worker.get_finished().loaded) == list(range(NUM_THREADS)), "it ends once"


def test_a_block_that_hangs_ends_the_loads_that_wait_for_a_thread(node: Node) -> None:
    node.keep(range(3))
    node.store.loading.clear()
    for seq_id in range(NUM_THREADS):
        node.load(seq_id, range(1 + seq_id, 2 + seq_id))
        assert node.store.begun.acquire(timeout=TIMEOUT_S)
    node.load(9, range(10, 13))
    node.clock.now_s = STORE_TIMEOUT_S - 0.01
    assert node.worker.get_finished() == Finished()
    node.clock.now_s = STORE_TIMEOUT_S
    assert node.worker.get_finished() == Finished(loaded=(9,))
    assert node.worker.get_block_ids_with_load_errors() == {10, 11, 12}
    assert node.ask(request(20)) == 0, "it is left alone"
    node.store.loading.set()
    for _ in range(1 + NUM_THREADS):
        node.wait()
    node.clock.now_s += PAUSE_S
    assert sorted(node.worker.get_finished().loaded) == list(range(NUM_THREADS))
    node.load(21, range(10, 13))
    node.wait()
    assert node.worker.get_finished().loaded == (21,)


def test_a_load_that_is_cancelled_ends_behind_the_block_that_is_being_loaded(node: Node) -> None:
    node.keep(range(3))
    node.store.loading.clear()
    node.load(7, range(10, 13))
    assert node.store.begun.acquire(timeout=TIMEOUT_S)
    node.scheduler.cancel(7)
    assert node.step() == Finished()
    node.store.loading.set()
    node.wait()
    assert node.worker.get_finished() == Finished(loaded=(7,), complete=(10,))
    assert node.worker.get_block_ids_with_load_errors() == {11, 12}


def test_a_question_that_is_cancelled_is_not_asked_any_more(node: Node) -> None:
    node.store.finding.clear()
    assert node.ask(request(1)) is None
    assert node.store.begun.acquire(timeout=TIMEOUT_S)
    assert node.ask(request(2)) is None
    node.scheduler.cancel(2)
    assert node.scheduler.build_connector_meta() is None
    node.store.finding.set()
    node.worker.shutdown(TIMEOUT_S)
    assert len(node.store.asked) == 1


def test_saves_the_groups_that_are_whole(node: Node) -> None:
    node.target[3], node.target[4], node.draft[3] = 3.0, 4.0, 5.0
    node.whole.remove(4)
    assert node.scheduler.wants_saves
    node.scheduler.save([BlockSave(3, HASHES[0]), BlockSave(4, HASHES[1])])
    node.step()
    node.wait()
    node.wait()
    assert sorted(node.worker.get_finished().saved) == [3, 4]
    assert sorted(node.store.blocks) == sorted(
        [(TARGET, HASHES[0]), (TARGET, HASHES[1]), (f"d1-draft-{BLOCK_SIZE}", HASHES[0])]
    )
    assert node.store.blocks[TARGET, HASHES[1]] == node.target[4].numpy().tobytes()


def test_a_save_that_raises_has_ended_all_the_same(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.store.breaks = True
    with caplog.at_level(logging.CRITICAL):
        node.scheduler.save([BlockSave(3, HASHES[0])])
        node.step()
        node.wait()
    assert node.worker.get_finished() == Finished(saved=(3,), save_failures=(SaveFailure.BROKEN,))


def test_what_the_store_does_not_keep_is_reported_with_the_reason(node: Node) -> None:
    node.store.keeps = False
    node.scheduler.save([BlockSave(3, HASHES[0])])
    node.step()
    node.wait()
    assert node.worker.get_finished() == Finished(saved=(3,), save_failures=(SaveFailure.FULL,))


class TestLayerwise:
    SAVE = BlockSave(3, HASHES[0], 0)

    @pytest.fixture
    def node(self) -> Iterator[Node]:
        node = Node(layerwise=True)
        yield node
        node.store.open()
        node.worker.shutdown(TIMEOUT_S)

    def saved(self, node: Node, num_layers: int) -> bytes:
        """What is kept of a block of ones that is full of twos by the time that it is offered."""
        node.target[3] = node.draft[3] = 1.0
        node.scheduler.announce([self.SAVE])
        node.step()
        for layer in range(num_layers):
            node.worker.save_kv_layer(layer)
        node.worker.wait_for_save()
        assert node.worker._stages is not None
        assert node.worker._stages.close(TIMEOUT_S)
        assert node.store.blocks == {}, "nothing is kept of what has not settled"
        node.target[3] = node.draft[3] = 2.0
        node.scheduler.save([self.SAVE])
        node.step()
        node.wait()
        assert node.worker.get_finished() == Finished(saved=(3,))
        assert node.store.blocks[f"d1-draft-{BLOCK_SIZE}", HASHES[0]] == node.draft[3].numpy().tobytes()
        return node.store.blocks[TARGET, HASHES[0]]

    def test_the_target_is_kept_as_its_layers_were_copied(self, node: Node) -> None:
        assert self.saved(node, 2) == torch.full_like(node.target[3], 1.0).numpy().tobytes()

    def test_a_block_with_a_layer_that_was_not_copied_is_read_as_a_whole(self, node: Node) -> None:
        assert self.saved(node, 1) == torch.full_like(node.target[3], 2.0).numpy().tobytes()

    def test_only_a_node_that_saves_is_told_of_layers(self) -> None:
        for node in (Node(is_producer=False, layerwise=True), Node()):
            assert not node.worker.is_layerwise
            assert not node.scheduler.wants_announcements
            assert node.worker._stages is None


def test_a_prompt_is_handed_on_by_its_hashes() -> None:
    node = Node(is_consumer=False)
    handle = node.scheduler.request_finished(request(1), [5, 6])
    assert handle is not None
    assert (handle.connector, handle.engine_id, handle.fingerprint) == ("fake", "e1", "f1")
    assert handle.description == "layers=4 dtype=bfloat16"
    assert (handle.num_tokens, handle.lease_id, handle.block_ids) == (2 * BLOCK_SIZE, "", ())
    assert Node(is_producer=False).scheduler.request_finished(request(1), [5, 6]) is None
    assert not Node(is_producer=False).scheduler.wants_saves


def test_shutdown_saves_what_was_ordered_and_loads_nothing(node: Node) -> None:
    node.keep(range(4))
    node.store.saving.clear()
    for number in range(NUM_THREADS):
        node.scheduler.save([BlockSave(number + 1, HASHES[8 + number])])
        node.step()
        assert node.store.begun.acquire(timeout=TIMEOUT_S)
    node.load(7, range(10, 13))
    threading.Timer(0.01, node.store.saving.set).start()
    node.worker.shutdown(TIMEOUT_S)
    assert all((TARGET, HASHES[8 + number]) in node.store.blocks for number in range(NUM_THREADS))
    assert not node.store.loaded
    node.worker.shutdown(TIMEOUT_S)
    assert node.store.num_closed == 1


def test_shutdown_does_not_wait_for_a_store_that_hangs(node: Node) -> None:
    node.store.finding.clear()
    node.store.saving.clear()
    assert node.ask(request(1)) is None
    node.scheduler.save([BlockSave(3, HASHES[0])])
    node.step()
    start_s = time.monotonic()
    node.worker.shutdown(0.05)
    assert time.monotonic() - start_s < 20
    assert node.store.num_closed == 0, "threads still use it"
