"""What is made of a handle that came with a request."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from connectors.base import BlockLoad, ConnectorContext, KVCaches, KVRequest
from connectors.peer.connector import MAX_BLOCK_ID, MAX_BLOCK_SIZE, PeerMetadata, PeerScheduler, PeerWorker
from connectors.peer.leases import LeaseTable
from connectors.peer.transport import LoadOutcome, PeerLoad
from server.kv_handle import KVHandle

HASHES = tuple(bytes([i]) * 32 for i in range(8))
HANDLE = KVHandle("tcp", "engine", "127.0.0.1:1", "ab" * 16, 12, (7, 3, 5), 4, "f")


@dataclass
class ScriptedTransport:
    """Remembers what it is asked for."""

    address: str = "127.0.0.1:9"
    refused: str | None = None
    ended: dict[int, Callable[[LoadOutcome], None]] = field(default_factory=dict)
    said: list[tuple[str, object]] = field(default_factory=list)

    def refusal(self, source: KVHandle) -> str | None:
        return self.refused

    def start(self, caches: KVCaches, leases: LeaseTable) -> None:
        raise AssertionError("there are no blocks here")

    def mark(self) -> None:
        self.said.append(("mark", None))

    def load(self, load: PeerLoad, ended: Callable[[LoadOutcome], None]) -> None:
        self.said.append(("load", load.seq_id))
        self.ended[load.seq_id] = ended

    def cancel(self, seq_id: int) -> None:
        self.said.append(("cancel", seq_id))

    def hold(self, source: KVHandle) -> None:
        self.said.append(("hold", source.lease_id))

    def release(self, source: KVHandle) -> None:
        self.said.append(("release", source.lease_id))

    def close(self, timeout_s: float) -> None:
        self.said.append(("close", None))


class Halves:
    """Both halves on a scripted transport, at 100 s on the clock."""

    def __init__(self, *, is_producer: bool = True, is_consumer: bool = True) -> None:
        self.notified = 0
        self.transport = ScriptedTransport()
        context = ConnectorContext(
            name="tcp",
            engine_id="us",
            block_size=4,
            fingerprint="f",
            notify=self._notify,
            clock=lambda: 100.0,
            is_producer=is_producer,
            is_consumer=is_consumer,
            kv_description="format=1 dtype=bfloat16 layers=4",
        )
        self.leases = LeaseTable(lease_s=30.0, peer_timeout_s=3.0, clock=context.clock, notify=context.notify)
        self.scheduler = PeerScheduler(self.transport, self.leases, context, transfer_timeout_s=5.0)
        self.worker = PeerWorker(self.transport, self.leases, context, sweep_period_s=0.1)

    def _notify(self) -> None:
        self.notified += 1

    def ask(self, source: KVHandle | None, num_computed: int = 0, *, num_hashes: int = 3, seq_id: int = 1) -> int:
        self.request = KVRequest(seq_id, "r", num_hashes * 4 + 1, HASHES[:num_hashes], source, 103.0)
        return self.scheduler.get_num_new_matched_tokens(self.request, num_computed)

    def metadata(self) -> PeerMetadata:
        metadata = self.scheduler.build_connector_meta()
        assert metadata is not None
        return metadata


@pytest.fixture
def halves() -> "Halves":
    return Halves()


@pytest.mark.parametrize(
    ("num_computed", "num_hashes", "expected"), [(0, 3, 12), (4, 3, 8), (12, 3, 0), (0, 8, 12), (16, 8, 0)]
)
def test_what_a_handle_promises(halves: Halves, num_computed: int, num_hashes: int, expected: int) -> None:
    assert halves.ask(HANDLE, num_computed, num_hashes=num_hashes) == expected


@pytest.mark.parametrize(("size", "num_ids", "expected"), [(6, 2, 12), (3, 3, 8), (5, 2, 8), (1, 12, 12), (13, 1, 12)])
def test_blocks_of_another_size_count_by_their_tokens(halves: Halves, size: int, num_ids: int, expected: int) -> None:
    handle = replace(HANDLE, block_size=size, num_tokens=size * num_ids, block_ids=tuple(range(num_ids)))
    assert halves.ask(handle) == expected


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"lease_id": "ab" * 15}, id="a short lease"),
        pytest.param({"lease_id": "AB" * 16}, id="a lease in capitals"),
        pytest.param({"lease_id": "ab" * 16 + "\n"}, id="a lease and more"),
        pytest.param({"lease_id": ""}, id="no lease"),
        pytest.param({"engine_id": "a\r\nFLUSHALL"}, id="an engine of two lines"),
        pytest.param({"engine_id": "a" * 65}, id="a long engine"),
        pytest.param({"num_tokens": 16}, id="more tokens than blocks"),
        pytest.param({"num_tokens": -12}, id="negative tokens"),
        pytest.param({"num_tokens": 1 << 60, "block_size": 1 << 59}, id="huge"),
        pytest.param({"num_tokens": 16, "block_ids": (1, 2, 3, 4)}, id="more than is known"),
        pytest.param({"block_size": 0}, id="blocks of nothing"),
        pytest.param({"block_size": MAX_BLOCK_SIZE + 1, "num_tokens": 0, "block_ids": ()}, id="huge blocks"),
        pytest.param({"block_ids": (1, 2, -1)}, id="a negative block"),
        pytest.param({"block_ids": (1, 2, MAX_BLOCK_ID + 1)}, id="a block out of range"),
    ],
)
def test_a_handle_that_can_not_be_is_of_no_use(halves: Halves, changes: dict[str, object]) -> None:
    assert halves.ask(replace(HANDLE, **changes)) == 0  # type: ignore[arg-type]
    assert halves.scheduler.build_connector_meta() is None


def test_kv_that_does_not_fit_is_given_back_once(halves: Halves) -> None:
    """It would be held until its lease ends, and with each request of a rolling upgrade there is more of it."""
    other = replace(HANDLE, fingerprint="g")
    assert halves.ask(other) == 0
    assert halves.metadata() == PeerMetadata(releases=(other,))
    assert halves.ask(other, seq_id=2) == 0
    assert halves.scheduler.build_connector_meta() is None


def test_a_node_that_must_not_be_asked_is_not_told_either(halves: Halves) -> None:
    halves.transport.refused = "allowed_peers does not have it"
    assert halves.ask(replace(HANDLE, fingerprint="g")) == 0
    assert halves.scheduler.build_connector_meta() is None


def test_both_fingerprints_are_named(halves: Halves, caplog: pytest.LogCaptureFixture) -> None:
    halves.ask(replace(HANDLE, fingerprint="g"))
    assert "request r is computed here: fingerprint g there, f here" in caplog.text


def test_what_differs_is_named_with_both_values(halves: Halves, caplog: pytest.LogCaptureFixture) -> None:
    halves.ask(replace(HANDLE, fingerprint="g", description="format=1 dtype=bfloat16 layers=3"))
    assert "request r is computed here: layers 3 there, 4 here" in caplog.text


def test_a_handle_of_another_connector_is_left_to_that(halves: Halves, caplog: pytest.LogCaptureFixture) -> None:
    """Among several connectors of a node it may be the next one's."""
    assert halves.ask(replace(HANDLE, connector="nixl")) == 0
    assert not caplog.messages
    assert halves.scheduler.build_connector_meta() is None


def test_the_transport_may_refuse_a_node(halves: Halves) -> None:
    halves.transport.refused = "allowed_peers does not have it"
    assert halves.ask(HANDLE) == 0


def test_without_a_handle_there_is_nothing(halves: Halves) -> None:
    assert halves.ask(None) == 0
    assert halves.scheduler.build_connector_meta() is None


def test_a_producer_loads_nothing_and_a_consumer_hands_nothing_on() -> None:
    producer = Halves(is_consumer=False)
    assert (producer.scheduler.wants_loads, producer.ask(HANDLE)) == (False, 0)
    request = KVRequest(1, "r", 13, HASHES[:3])
    assert Halves(is_producer=False).scheduler.request_finished(request, (1, 2, 3)) is None
    assert Halves().scheduler.request_finished(replace(request, hashes=()), ()) is None


def test_a_load_is_ordered_once(halves: Halves) -> None:
    assert halves.ask(HANDLE, 4) == 8
    halves.scheduler.update_state_after_alloc(BlockLoad(1, (8, 9), HASHES[1:3], 1, HANDLE))
    metadata = halves.metadata()
    assert metadata == PeerMetadata(loads=(PeerLoad(1, HANDLE, (8, 9), HASHES[1:3], 1, 103.0),))
    assert halves.scheduler.build_connector_meta() is None
    assert halves.ask(HANDLE, 4, seq_id=2) == 0


def test_a_lease_is_held_as_long_as_it_is_asked_for(halves: Halves) -> None:
    for _ in range(2):
        assert halves.ask(HANDLE) == 12
        assert halves.metadata() == PeerMetadata(holds=(HANDLE,))
    assert halves.scheduler.build_connector_meta() is None


def test_a_lease_that_nothing_is_wanted_of_is_given_back(halves: Halves) -> None:
    assert halves.ask(HANDLE) == 12
    assert halves.ask(HANDLE, 12) == 0
    assert halves.metadata() == PeerMetadata(releases=(HANDLE,))


def test_a_handle_of_our_own(halves: Halves) -> None:
    handle = halves.scheduler.request_finished(KVRequest(5, "r", 13, HASHES[:3]), (4, 6, 2))
    assert handle is not None
    description = "format=1 dtype=bfloat16 layers=4"
    assert handle == KVHandle("tcp", "us", "127.0.0.1:9", handle.lease_id, 12, (4, 6, 2), 4, "f", description)
    assert halves.ask(handle) == 12
    halves.scheduler.cancel(5)
    assert halves.worker.get_finished().released == (handle.lease_id,)
    assert halves.worker.get_finished().released == ()
    halves.worker.shutdown(1.0)


def test_the_worker_passes_orders_on_and_reports_ends(halves: Halves) -> None:
    loads = [PeerLoad(seq_id, HANDLE, (seq_id,), HASHES[:1], 0, 105.0) for seq_id in (1, 2)]
    halves.worker.start_load_kv(PeerMetadata(tuple(loads), (1,), (HANDLE,), (HANDLE,)))
    lease_id = HANDLE.lease_id
    assert halves.transport.said == [
        ("mark", None),
        ("hold", lease_id),
        ("load", 1),
        ("load", 2),
        ("cancel", 1),
        ("release", lease_id),
    ]
    assert not halves.worker.get_finished()
    halves.transport.ended[1](LoadOutcome(frozenset({1})))
    halves.transport.ended[2](LoadOutcome(frozenset(), (2,)))
    assert halves.notified == 2
    finished = halves.worker.get_finished()
    assert (finished.loaded, finished.complete) == ((1, 2), (2,))
    assert halves.worker.get_block_ids_with_load_errors() == {1}
    halves.worker.get_finished()
    assert halves.worker.get_block_ids_with_load_errors() == frozenset()
    halves.worker.shutdown(1.0)
    assert halves.transport.said[-1] == ("close", None)
