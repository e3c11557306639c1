"""Blocks that go from node to node over TCP."""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from connectors.tcp.messages import PROTOCOL_VERSION
from server.kv_handle import KVHandle
from tests.fakes.kv_node import KVNode, ask_until_renewed
from tests.fakes.relay import Relay
from tests.fakes.thread_watch import no_thread_is_left

Node = Callable[..., KVNode]
LARGE = 1 << 14  # width of blocks of 1.5 MiB
PATIENT = {"transfer_timeout_seconds": 20.0, "peer_timeout_seconds": 20.0}
"""A machine that is busy with other things is no node that hangs."""


@pytest.fixture
def node() -> Iterator[Node]:
    """Makes nodes, each with a name of its own; none leaves a thread behind."""
    nodes: list[KVNode] = []

    def make(**settings: object) -> KVNode:
        given = {"engine_id": f"engine-{len(nodes)}", **PATIENT, **settings}
        nodes.append(KVNode(**given))  # type: ignore[arg-type]
        return nodes[-1]

    with no_thread_is_left():
        yield make
        for each in nodes:
            each.close()


@pytest.fixture(params=[None, 80], ids=["whole", "in parts"])
def _parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How blocks are sent. Of parts the last one is shorter."""
    if request.param is not None:
        monkeypatch.setattr("connectors.tcp.parts.CHUNK_NBYTES", request.param)


@pytest.fixture
def relay() -> Iterator[Callable[..., Relay]]:
    relays: list[Relay] = []

    def make(handle: KVHandle, change: Callable[[bytes, int], bytes | None]) -> Relay:
        relays.append(Relay(handle.address, change))
        return relays[-1]

    yield make
    for each in relays:
        each.close()


@pytest.mark.usefixtures("_parts")
def test_blocks_arrive_and_the_lease_ends(node: Node) -> None:
    producer, consumer = node(), node()
    content = producer.fill()
    handle = producer.hand_on(3, 1, 2)
    assert (handle.num_tokens, handle.block_size) == (12, 4)
    assert consumer.wait_for_load(consumer.begin(handle, 7, 5, 6)) == frozenset()
    assert torch.equal(consumer.blocks[[7, 5, 6]], content[[3, 1, 2]])
    untouched = [i for i in range(16) if i not in (5, 6, 7)]
    assert not consumer.blocks[untouched].any()
    assert consumer.ended.complete == {5, 6, 7}
    producer.wait_for_release(handle)


def test_what_is_here_already_is_not_fetched(node: Node) -> None:
    producer, consumer = node(), node()
    content = producer.fill()
    handle = producer.hand_on(0, 1, 2, 3, 4)
    request = consumer.request(5, source=handle)
    assert consumer.matched(request, num_computed_blocks=2) == 3
    consumer.wait_for_load(consumer.order(request, (9, 8), first_block=2))
    assert torch.equal(consumer.blocks[[9, 8]], content[[2, 3]])
    assert consumer.blocks.any(dim=(1, 2, 3, 4)).sum() == 2


def test_a_handle_that_nothing_is_wanted_of_is_given_back(node: Node) -> None:
    producer, consumer = node(), node()
    handle = producer.hand_on(0, 1)
    assert consumer.matched(consumer.request(2, source=handle), num_computed_blocks=2) == 0
    consumer.step()
    producer.wait_for_release(handle)


@pytest.mark.usefixtures("_parts")
@pytest.mark.parametrize(
    ("ours", "theirs", "whole", "complete"),
    [
        pytest.param("d1", "d1", {0, 1, 2}, {0, 1, 2}, id="the same draft"),
        pytest.param("d1", "d1", {0, 2}, {0, 2}, id="a draft that lacks a block"),
        pytest.param("d1", "d2", {0, 1, 2}, set(), id="another draft"),
        pytest.param("d1", None, {0, 1, 2}, set(), id="no draft there"),
        pytest.param(None, "d1", {0, 1, 2}, {0, 1, 2}, id="no draft here"),
    ],
)
def test_drafts_travel_where_both_sides_have_them(
    node: Node, ours: str | None, theirs: str | None, whole: set[int], complete: set[int]
) -> None:
    producer, consumer = node(draft=theirs), node(draft=ours)
    content = producer.fill()
    producer.whole_drafts.intersection_update(whole)
    assert consumer.wait_for_load(consumer.begin(producer.hand_on(0, 1, 2), 0, 1, 2)) == frozenset()
    assert torch.equal(consumer.blocks[:3], content[:3])
    assert consumer.ended.complete == complete
    for block_id in range(3):
        came = torch.equal(consumer.drafts[block_id], producer.drafts[block_id])
        assert came == (ours is not None and block_id in complete)


@pytest.mark.usefixtures("_parts")
@pytest.mark.parametrize(("theirs", "ours"), [(4, 6), (6, 4), (4, 8), (8, 4), (7, 3), (3, 7), (1, 5)])
@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_blocks_of_another_size_are_cut_anew(node: Node, theirs: int, ours: int, skipped: int) -> None:
    num_theirs = -(-24 // theirs)
    producer = node(block_size=theirs, draft="d", num_blocks=num_theirs)
    consumer = node(block_size=ours, draft="d")
    place = list(range(num_theirs))
    random.Random(theirs).shuffle(place)
    content = producer.fill()
    handle = producer.hand_on(*place)
    num_ours = num_theirs * theirs // ours
    request = replace(consumer.request(num_ours, source=handle), num_tokens=num_theirs * theirs + 1)
    assert consumer.matched(request, skipped) == num_ours - skipped
    block_ids = tuple(range(num_ours - skipped))
    assert consumer.wait_for_load(consumer.order(request, block_ids, skipped)) == frozenset()
    sent = content[place].permute(1, 2, 0, 3, 4).flatten(2, 3)
    got = consumer.blocks[list(block_ids)].permute(1, 2, 0, 3, 4).flatten(2, 3)
    assert torch.equal(got, sent[:, :, skipped * ours : num_ours * ours])
    assert consumer.ended.complete == set()


def test_many_loads_at_once(node: Node) -> None:
    producer = node(num_blocks=200)
    content = producer.fill()
    consumers = [node(num_blocks=200, num_threads=3) for _ in range(3)]
    loads = []
    for start in range(0, 200, 5):
        places = tuple(range(start, start + 5))
        for consumer in consumers:
            handle = producer.hand_on(*places)
            loads.append((consumer, consumer.begin(handle, *places), handle))
    for consumer, seq_id, handle in loads:
        assert consumer.wait_for_load(seq_id) == frozenset()
        producer.wait_for_release(handle)
    for consumer in consumers:
        assert torch.equal(consumer.blocks, content)


def test_two_sequences_of_one_lease(node: Node) -> None:
    """The second is told of nothing, as the first one's load comes but once."""
    producer, consumer = node(), node()
    producer.fill()
    handle = producer.hand_on(0, 1)
    first = consumer.begin(handle, 0, 1)
    assert consumer.matched(consumer.request(2, source=handle)) == 0
    assert consumer.wait_for_load(first) == frozenset()
    producer.wait_for_release(handle)


@pytest.mark.parametrize("is_other", [False, True], ids=["never given", "of other tokens"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_nobody_gets_what_is_not_meant_for_them(node: Node, is_other: bool, size: int) -> None:
    producer, consumer = node(), node(block_size=size)
    producer.fill()
    handle = producer.hand_on(0, 1, 2, 3, text="secret")
    forged = handle if is_other else replace(handle, lease_id="0" * 32)
    block_ids = range(16 // size)
    assert consumer.wait_for_load(consumer.begin(forged, *block_ids)) == set(block_ids)
    assert not consumer.blocks.any()


def test_a_held_lease_ends_once_nobody_asks_any_more(node: Node) -> None:
    producer, consumer = node(peer_timeout_seconds=0.3, lease_seconds=3600), node(peer_timeout_seconds=0.3)
    handle = producer.hand_on(0, 1)
    ask_until_renewed(consumer, consumer.request(2, source=handle))
    producer.wait_for_release(handle)


@pytest.mark.usefixtures("_parts")
def test_a_flipped_byte_costs_its_block(node: Node, relay: Callable[..., Relay]) -> None:
    producer, consumer = node(num_blocks=4, width=LARGE), node(num_blocks=4, width=LARGE)
    content = producer.fill()
    nbytes = content[0].numel() * 4
    place = 2 * nbytes + nbytes // 2

    def flip(data: bytes, num_before: int) -> bytes:
        if not num_before <= place < num_before + len(data):
            return data
        changed = bytearray(data)
        changed[place - num_before] ^= 1
        return bytes(changed)

    handle = producer.hand_on(0, 1, 2, 3)
    handle = relay(handle, flip).through(handle)
    assert consumer.wait_for_load(consumer.begin(handle, 0, 1, 2, 3)) == {2}
    assert torch.equal(consumer.blocks[[0, 1, 3]], content[[0, 1, 3]])
    assert consumer.ended.complete == {0, 1, 3}
    producer.wait_for_release(handle)


@pytest.mark.parametrize("sizes", [(4, 4), (4, 6)], ids=["one size", "two sizes"])
def test_a_lost_connection_is_replaced_once(node: Node, relay: Callable[..., Relay], sizes: tuple[int, int]) -> None:
    producer, consumer = node(block_size=sizes[0], width=LARGE), node(block_size=sizes[1], width=LARGE)
    content = producer.fill()
    lost: list[int] = []

    def lose_first(data: bytes, num_before: int) -> bytes | None:
        if num_before > 1 << 20 and not lost:
            lost.append(num_before)
            return None
        return data

    handle = producer.hand_on(0, 1, 2, 3, 4, 5)
    handle = relay(handle, lose_first).through(handle)
    num_ours = 24 // sizes[1]
    assert consumer.wait_for_load(consumer.begin(handle, *range(num_ours))) == frozenset()
    assert lost
    got = consumer.blocks[:num_ours].permute(1, 2, 0, 3, 4).flatten(2, 3)
    assert torch.equal(got, content[:6].permute(1, 2, 0, 3, 4).flatten(2, 3))


def test_a_load_that_stalls_ends_in_time_and_keeps_what_came(node: Node, relay: Callable[..., Relay]) -> None:
    producer = node(num_blocks=24, width=LARGE, peer_timeout_seconds=3.0)
    consumer = node(num_blocks=24, width=LARGE, transfer_timeout_seconds=4.0, peer_timeout_seconds=3.0)
    content = producer.fill()
    gate = threading.Event()

    def stall(data: bytes, num_before: int) -> bytes | None:
        if num_before > 17 << 20:  # in the second chunk
            gate.wait(60.0)
            return None
        return data

    handle = producer.hand_on(*range(24))
    handle = relay(handle, stall).through(handle)
    bad = consumer.wait_for_load(consumer.begin(handle, *range(24)))
    num_good = min(bad)
    assert 0 < num_good < 24
    assert bad == set(range(num_good, 24))
    assert torch.equal(consumer.blocks[:num_good], content[:num_good])
    producer.wait_for_release(handle)
    gate.set()


def test_cancelling_at_any_point_leaves_nothing_behind(node: Node, relay: Callable[..., Relay]) -> None:
    producer, consumer = node(num_blocks=8, width=LARGE // 8), node(num_blocks=8, width=LARGE // 8)
    producer.fill()
    chance = random.Random(0)
    total = producer.blocks[:4].nbytes
    for attempt in range(40):
        point, reached, gate = chance.randrange(-total // 4, total), threading.Event(), threading.Event()

        def wait_there(
            data: bytes,
            num_before: int,
            point: int = point,
            reached: threading.Event = reached,
            gate: threading.Event = gate,
        ) -> bytes:
            if num_before + len(data) > point:
                reached.set()
                gate.wait(60.0)
            return data

        places = [i + 4 * (attempt % 2) for i in range(4)]
        handle = producer.hand_on(*places)
        between = relay(handle, wait_there)
        handle = between.through(handle)
        seq_id = consumer.begin(handle, *places)
        if point > 0:
            assert reached.wait(30.0)
        side = chance.choice(["here", "there", "both"])
        if side != "there":
            consumer.scheduler.cancel(seq_id)
        if side != "here":
            producer.scheduler.cancel(producer.sequences[handle.lease_id])
            gate.set()
        consumer.step()
        consumer.wait_for_load(seq_id)
        gate.set()
        producer.wait_for_release(handle)
        between.close()
    assert len(producer.ended.released) == 40


def test_a_load_that_has_not_begun_is_cancelled_at_once(node: Node, relay: Callable[..., Relay]) -> None:
    producer, consumer = node(), node(num_threads=1)
    gate = threading.Event()

    def stall(data: bytes, _: int) -> bytes:
        gate.wait(60.0)
        return data

    first, second = producer.hand_on(0), producer.hand_on(1)
    between = relay(first, stall)
    first, second = between.through(first), between.through(second)
    stalled, waiting = consumer.begin(first, 0), consumer.begin(second, 1)
    consumer.scheduler.cancel(waiting)
    consumer.step()
    assert consumer.wait_for_load(waiting) == {1}
    assert stalled not in consumer.ended.bad
    gate.set()
    assert consumer.wait_for_load(stalled) == frozenset()
    producer.wait_for_release(second)


def test_a_node_that_was_started_anew_is_another_one(node: Node) -> None:
    producer, consumer = node(engine_id="before"), node()
    old = producer.hand_on(0, 1)
    port = int(old.address.rpartition(":")[2])
    consumer.wait_for_load(consumer.begin(producer.hand_on(2, 3), 2, 3))
    producer.close()
    producer = node(engine_id="after", port=port)
    content = producer.fill(1)
    assert consumer.wait_for_load(consumer.begin(old, 4, 5)) == {4, 5}
    assert not consumer.blocks[[4, 5]].any()
    assert consumer.wait_for_load(consumer.begin(producer.hand_on(0, 1), 6, 7)) == frozenset()
    assert torch.equal(consumer.blocks[[6, 7]], content[:2])


def test_a_connection_that_was_closed_while_idle_is_replaced(node: Node) -> None:
    producer, consumer = node(engine_id="same"), node()
    handle = producer.hand_on(0)
    port = int(handle.address.rpartition(":")[2])
    consumer.wait_for_load(consumer.begin(handle, 0))
    producer.close()
    producer = node(engine_id="same", port=port)
    content = producer.fill()
    assert consumer.wait_for_load(consumer.begin(producer.hand_on(1), 1)) == frozenset()
    assert torch.equal(consumer.blocks[1], content[1])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"fingerprint": "c3d4"}, "fingerprint: a1b2 here, c3d4 there"),
        ({"width": 16}, "geometry [layers, heads, 2 * head_dim]: [2, 3, 8] here, [2, 3, 16] there"),
        ({"block_size": 8}, "block size: 4 by its handle, 8 by itself"),
    ],
)
def test_blocks_that_do_not_fit_are_refused_with_both_values(
    node: Node, settings: dict[str, object], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = node(**settings), node()
    handle = replace(producer.hand_on(0, 1), fingerprint="a1b2", block_size=4, num_tokens=8)
    assert consumer.wait_for_load(consumer.begin(handle, 4, 5)) == {4, 5}
    assert named in caplog.text


def test_a_node_of_another_version_is_not_read_from(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = node(), node()
    producer.fill()
    monkeypatch.setattr("connectors.tcp.serving.PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    assert consumer.wait_for_load(consumer.begin(producer.hand_on(0, 1), 4, 5)) == {4, 5}
    asked, had = PROTOCOL_VERSION, PROTOCOL_VERSION + 1
    assert f"protocol version {asked} was asked for, this node has {had}" in caplog.text
    assert not consumer.blocks.any()


def test_nobody_answers(node: Node) -> None:
    producer, consumer = node(), node()
    handle = producer.hand_on(0, 1)
    producer.close()
    assert consumer.wait_for_load(consumer.begin(handle, 4, 5)) == {4, 5}


def test_the_deadline_of_a_request_may_be_nearer(node: Node) -> None:
    producer, consumer = node(), node(clock=lambda: 50.0)
    handle = producer.hand_on(0, 1)
    assert consumer.wait_for_load(consumer.begin(handle, 4, 5, deadline_s=50.0)) == {4, 5}
    producer.wait_for_release(handle)
