"""What every connector keeps to, seen through connectors.base alone; a new one is a line in CASES."""

import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from server.kv_handle import KVHandle
from server.model.fingerprint import describe_kv, fingerprint, kv_fingerprint
from tests.fakes.connector_under_test import BLOCK_SIZE, FINGERPRINT, ConnectorUnderTest, connector_under_test
from tests.fakes.thread_watch import no_thread_is_left

HASHES = [hashlib.sha256(bytes([i])).digest() for i in range(5)]
OTHER_HASHES = [hashlib.sha256(bytes([i])).digest() for i in range(100, 105)]
FROM = [3, 1, 7, 2, 9]
TO = [4, 5, 6, 8, 10]


def _store(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_extra_config": extra}


MEMORY = _store("memory", max_bytes="1MiB")
FILES = _store("filesystem", shared_storage_path="FOLDER")
OUT_OF_TREE = _store("tests.fakes.example_connectors:PlainFilesConfig", folder="FOLDER")
LAYERWISE_MEMORY = _store("memory", max_bytes="1MiB", layerwise=True)
LAYERWISE_FILES = _store("filesystem", shared_storage_path="FOLDER", layerwise=True)
LAYERWISE_OUT_OF_TREE = _store("tests.fakes.layer_files:LayerFilesConfig", folder="FOLDER")


@dataclass(frozen=True, slots=True)
class Case:
    """A connector as it is configured.

    Attributes:
        choice: FOLDER stands for one that all nodes share, PORT for that of an LMCache server.
        is_of_one_node: what one node saves, others do not find.
        has_files: its blocks are files in the folder.
        has_server: its blocks are in an LMCache server.
        finds: whether anything is ever found.
        is_layerwise: whether it takes blocks layer by layer.
    """

    choice: dict[str, Any]
    is_of_one_node: bool = False
    has_files: bool = False
    has_server: bool = False
    finds: bool = True
    is_layerwise: bool = False


CASES = {
    "null": Case(_store("null"), finds=False),
    "tcp": Case(_store("tcp")),
    "nixl": Case(_store("nixl")),
    "memory": Case(MEMORY, is_of_one_node=True),
    "filesystem": Case(FILES, has_files=True),
    "fault": Case(_store("fault", store=FILES, max_delay_seconds=0.01), has_files=True),
    "out-of-tree": Case(OUT_OF_TREE, has_files=True),
    "lmcache": Case(_store("lmcache", port="PORT"), has_server=True),
    "memory-layerwise": Case(LAYERWISE_MEMORY, is_of_one_node=True, is_layerwise=True),
    "filesystem-layerwise": Case(LAYERWISE_FILES, has_files=True, is_layerwise=True),
    "out-of-tree-layerwise": Case(LAYERWISE_OUT_OF_TREE, has_files=True, is_layerwise=True),
    "lmcache-layerwise": Case(_store("lmcache", port="PORT", layerwise=True), has_server=True, is_layerwise=True),
    "multi": Case(_store("multi", connectors=[_store("null"), MEMORY, FILES])),
    "multi-of-files": Case(_store("multi", connectors=[OUT_OF_TREE, FILES]), has_files=True),
    "multi-layerwise": Case(
        _store("multi", connectors=[LAYERWISE_MEMORY, FILES, LAYERWISE_FILES]), has_files=True, is_layerwise=True
    ),
}


needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")


@pytest.fixture(params=[pytest.param(name, marks=[needs_nixl] if name == "nixl" else []) for name in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


class Nodes:
    """Nodes that share a folder; they end with the test."""

    def __init__(self, case: Case, folder: Path, port: int | None, stack: ExitStack) -> None:
        self.case = case
        self.folder = folder
        self._port = port
        self._stack = stack

    def start(self, fingerprint: str = FINGERPRINT, kv_description: str = "", **settings: Any) -> ConnectorUnderTest:
        choice = _in_places({**self.case.choice, **settings}, {"FOLDER": str(self.folder), "PORT": self._port})
        return self._stack.enter_context(connector_under_test(choice, fingerprint, kv_description))

    def start_both(self) -> tuple[ConnectorUnderTest, ConnectorUnderTest]:
        """The node that computes, and the one that goes on: perhaps the same."""
        first = self.start()
        return first, first if self.case.is_of_one_node else self.start()

    def skip_unless(self, is_so: bool) -> None:
        """Of what is no question for each connector."""
        if not is_so:
            pytest.skip("not of this connector")


def _in_places(value: Any, places: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {name: _in_places(item, places) for name, item in value.items()}
    if isinstance(value, list):
        return [_in_places(item, places) for item in value]
    return places.get(value, value) if isinstance(value, str) else value


@pytest.fixture
def nodes(case: Case, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    port = request.getfixturevalue("lmcache_server").port if case.has_server else None
    with ExitStack() as stack:
        yield Nodes(case, tmp_path, port, stack)


def hand_on(node: ConnectorUnderTest) -> KVHandle | None:
    """As a prompt ends on a node: its blocks are saved, and whoever goes on is told where they are."""
    node.save(FROM, HASHES)
    handle = node.connector.scheduler.request_finished(node.request(HASHES), FROM)
    node.step()
    return handle


def test_what_one_node_has_another_can_load(nodes: Nodes) -> None:
    here, there = nodes.start_both()
    request = there.request(HASHES, hand_on(here))
    assert there.match(request) == (len(HASHES) if nodes.case.finds else 0)
    nodes.skip_unless(nodes.case.finds)
    expected = here.content(FROM)
    there.load(request, TO)
    there.wait_loaded(request)
    assert not there.bad
    assert sorted(there.complete) == sorted(TO)
    for ours, theirs in zip(there.content(TO), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert there.loaded == [request.seq_id], "once"


def test_only_what_was_ordered_is_written(nodes: Nodes) -> None:
    """Some blocks are here already, and there is no room for the last."""
    nodes.skip_unless(nodes.case.finds)
    here, there = nodes.start_both()
    request = there.request(HASHES, hand_on(here))
    assert there.match(request, num_computed_blocks=2) == 3
    to = TO[:2]
    rest = [block_id for block_id in range(12) if block_id not in to]
    before, expected = there.content(rest), here.content(FROM[2:4])
    there.load(request, to, first_block=2)
    there.wait_loaded(request)
    assert not there.bad
    for ours, theirs in zip(there.content(to) + there.content(rest), expected + before, strict=True):
        assert torch.equal(ours, theirs)


def test_blocks_that_are_held_are_released(nodes: Nodes) -> None:
    here, there = nodes.start_both()
    handle = hand_on(here)
    nodes.skip_unless(handle is not None and handle.lease_id != "")
    assert handle is not None
    request = there.request(HASHES, handle)
    assert there.match(request)
    there.load(request, TO)
    there.wait_loaded(request)
    here.steps_until(lambda: here.released == [handle.lease_id])


def test_a_handle_tells_what_it_stands_for(nodes: Nodes) -> None:
    here = nodes.start()
    handle = hand_on(here)
    assert (handle is None) == (not nodes.case.finds)
    if handle is not None:
        assert (handle.num_tokens, handle.block_size) == (len(HASHES) * BLOCK_SIZE, BLOCK_SIZE)
        assert handle.fingerprint == FINGERPRINT


def test_another_prompt_is_a_miss(nodes: Nodes) -> None:
    here, there = nodes.start_both()
    hand_on(here)
    assert there.match(there.request(OTHER_HASHES)) == 0
    assert there.match(there.request([*OTHER_HASHES[:1], *HASHES[1:]])) == 0, "its first block is another one"


def test_another_model_is_a_miss(nodes: Nodes) -> None:
    """Whatever its handle says, as that comes from a client."""
    handle = hand_on(nodes.start())
    other = nodes.start(fingerprint="0ther")
    assert other.match(other.request(HASHES, handle)) == 0


LAYERS = {"num_hidden_layers": 3}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}


def start_with(
    nodes: Nodes, *, dtype: torch.dtype = torch.float32, digest: str = "a", **config: Any
) -> ConnectorUnderTest:
    """A node of a model like that."""
    model = LlamaConfig(**{"num_hidden_layers": 2, **config})
    of_kv = kv_fingerprint(fingerprint(digest * 64, model, dtype), dtype).hex()
    return nodes.start(of_kv, describe_kv(digest * 64, model, dtype, dtype))


@pytest.mark.parametrize(
    ("changes", "version", "told"),
    [
        pytest.param({"dtype": torch.bfloat16}, 1, "dtype float32 there, bfloat16 here", id="dtype"),
        pytest.param({"digest": "b"}, 1, "weights aaaaaaaaaaaa there, bbbbbbbbbbbb here", id="weights"),
        pytest.param(ROPE, 1, "rope ", id="rope"),
        pytest.param(LAYERS, 1, "layers 2 there, 3 here", id="layers"),
        pytest.param({}, 2, "format 1 there, 2 here", id="format version"),
    ],
)
def test_kv_that_means_something_else_is_refused_with_both_values(
    nodes: Nodes,
    changes: dict[str, Any],
    version: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And whoever holds it for others is told that it is of no use."""
    here = start_with(nodes)
    handle = hand_on(here)
    monkeypatch.setattr("server.model.fingerprint.KV_FORMAT_VERSION", version)
    there = start_with(nodes, **changes)
    assert there.match(there.request(HASHES, handle)) == 0
    there.step()
    assert (told in caplog.text) == (handle is not None)
    if handle is not None and handle.lease_id:
        here.steps_until(lambda: here.released == [handle.lease_id])


def test_a_node_whose_kv_is_not_what_its_handle_says_is_found_out(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    """A handle comes from a client, so the nodes compare what they have themselves."""
    handle = hand_on(nodes.start())
    nodes.skip_unless(handle is not None and handle.lease_id != "")
    assert handle is not None
    there = nodes.start(fingerprint="0ther")
    before = there.content(TO)
    request = there.request(HASHES, replace(handle, fingerprint="0ther"))
    assert there.match(request) == len(HASHES)
    there.load(request, TO)
    there.wait_loaded(request)
    assert there.bad == set(TO)
    assert f"fingerprint: 0ther here, {FINGERPRINT} there" in caplog.text
    for ours, theirs in zip(there.content(TO), before, strict=True):
        assert torch.equal(ours, theirs)


def test_nothing_beyond_what_is_computed_here(nodes: Nodes) -> None:
    here, there = nodes.start_both()
    request = there.request(HASHES, hand_on(here))
    assert there.match(request, num_computed_blocks=len(HASHES)) == 0


def test_the_direction_is_kept_to(nodes: Nodes) -> None:
    here = nodes.start(kv_role="kv_producer")
    handle = hand_on(here)
    assert here.match(here.request(HASHES, handle)) == 0
    there = nodes.start(kv_role="kv_consumer")
    assert not there.connector.scheduler.wants_saves
    assert there.connector.scheduler.request_finished(there.request(HASHES), FROM) is None
    request = there.request(HASHES, handle)
    finds_others = nodes.case.finds and not nodes.case.is_of_one_node
    assert there.match(request) == (len(HASHES) if finds_others else 0)


def test_a_handle_names_no_place_that_is_not_configured(nodes: Nodes) -> None:
    """Neither a host nor a path: a node that may not be asked hears nothing, and stores have no use for an address."""
    handle = hand_on(nodes.start())
    nodes.skip_unless(handle is not None)
    assert handle is not None
    is_peer = handle.lease_id != ""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        rules: dict[str, Any] = {}
        if is_peer:
            rules = {"kv_connector_extra_config": {"allowed_peers": ["127.0.0.1:1", "10.0.0.0/8"]}}
        there = nodes.start(**rules)
        for place in (address, "/etc/passwd", "../../etc"):
            elsewhere = replace(handle, address=place, lease_id="ab" * 16, block_ids=tuple(range(len(HASHES))))
            request = there.request(OTHER_HASHES, elsewhere)
            assert there.match(request) == 0
            there.step()
        there.connector.worker.shutdown(10.0)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_an_answer_takes_less_than_a_millisecond_whatever_hangs(
    nodes: Nodes, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's mount, LMCache's server, or the node that has the blocks."""
    handle, there = hand_on(nodes.start()), nodes.start()
    durations: list[float] = []
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        if handle is not None and handle.lease_id:
            handle = replace(handle, address=f"127.0.0.1:{listener.getsockname()[1]}")
        stack.callback(hang_folder(nodes.folder, monkeypatch).set)
        if nodes.case.has_server:
            server = request.getfixturevalue("lmcache_server")
            stack.callback(server.go_on)
            server.stop()
        for number in range(100):
            if handle is not None and handle.lease_id:
                handle = replace(handle, lease_id=f"{number:032x}")
            asked = there.request(HASHES, handle)
            begun_s = time.perf_counter()
            there.connector.scheduler.get_num_new_matched_tokens(asked, 0)
            durations.append(time.perf_counter() - begun_s)
    assert median(durations) < 1e-3
    assert max(durations) < 0.5, "nobody was waited for, not even once"


def hang_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Whoever looks at a file in it waits. Returns: has them go on."""
    goes_on, look = threading.Event(), os.stat

    def wait_and_look(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str | Path) and str(path).startswith(str(folder)):
            goes_on.wait(5.0)
        return look(path, *args, **options)

    monkeypatch.setattr(os, "stat", wait_and_look)
    return goes_on


def test_a_file_that_goes_between_match_and_load(nodes: Nodes) -> None:
    """Its block and those behind it are said to be bad; those in front of it are good."""
    nodes.skip_unless(nodes.case.has_files)
    here, there = nodes.start_both()
    request = there.request(HASHES, hand_on(here))
    assert there.match(request) == len(HASHES)
    removed = [path for path in nodes.folder.rglob("*") if path.is_file() and HASHES[2].hex() in path.name]
    assert removed
    for path in removed:
        path.unlink()
    there.load(request, TO)
    there.wait_loaded(request)
    assert there.bad == set(TO[2:])
    for ours, theirs in zip(there.content(TO[:2]), here.content(FROM[:2]), strict=True):
        assert torch.equal(ours, theirs)


def test_a_cancelled_load_is_reported(nodes: Nodes) -> None:
    """Once, when nothing writes to its blocks any more: they stay as they are then."""
    nodes.skip_unless(nodes.case.finds)
    here, there = nodes.start_both()
    request = there.request(HASHES, hand_on(here))
    assert there.match(request)
    there.load(request, TO)
    there.connector.scheduler.cancel(request.seq_id)
    there.wait_loaded(request)
    left = there.content(TO)
    there.connector.scheduler.cancel(request.seq_id)
    assert there.match(there.request(OTHER_HASHES)) == 0
    assert there.loaded == [request.seq_id]
    for ours, theirs in zip(there.content(TO), left, strict=True):
        assert torch.equal(ours, theirs)


def test_a_cancelled_question_is_forgotten(nodes: Nodes) -> None:
    """The same prompt of another sequence is found as before."""
    here, there = nodes.start_both()
    handle = hand_on(here)
    request = there.request(HASHES)
    there.connector.scheduler.get_num_new_matched_tokens(request, 0)
    there.connector.scheduler.cancel(request.seq_id)
    there.step()
    assert there.match(there.request(HASHES, handle)) == (len(HASHES) if nodes.case.finds else 0)
    assert there.loaded == []


def test_who_takes_layers_says_so(nodes: Nodes) -> None:
    connector = nodes.start().connector
    assert connector.worker.is_layerwise == connector.scheduler.wants_announcements == nodes.case.is_layerwise


def test_what_was_announced_and_not_offered_is_not_found(nodes: Nodes) -> None:
    """Its step has failed, or its sequence has ended: all that is known of it is what it should have been."""
    nodes.skip_unless(nodes.case.is_layerwise)
    here, there = nodes.start_both()
    here.announce(FROM, HASHES)
    here.step()
    here.save(FROM[3:], OTHER_HASHES[3:])
    assert there.match(there.request(HASHES)) == 0
    assert sorted(here.saved) == sorted(FROM[3:])


@pytest.mark.parametrize("layer", [0, 1])
def test_blocks_of_a_step_that_failed_between_layers_are_saved_all_the_same(nodes: Nodes, layer: int) -> None:
    """If they are full for another reason, as what was offered of the layers before is not all."""
    nodes.skip_unless(nodes.case.is_layerwise)
    here, there = nodes.start_both()
    saves = here.announce(FROM, HASHES)
    here.step(fails_at=layer)
    here.connector.scheduler.save(saves)
    here.steps_until(lambda: len(here.saved) == len(saves))
    request = there.request(HASHES)
    assert there.match(request) == len(HASHES)
    there.load(request, TO)
    there.wait_loaded(request)
    assert not there.bad
    for ours, theirs in zip(there.content(TO), here.content(FROM), strict=True):
        assert torch.equal(ours, theirs)


def test_many_sequences_at_a_time(nodes: Nodes) -> None:
    """Each gets its own block, and each is reported once."""
    nodes.skip_unless(nodes.case.finds)
    here, there = nodes.start_both()
    handles = []
    for place in range(len(FROM)):
        here.save([FROM[place]], [HASHES[place]])
        handles.append(here.connector.scheduler.request_finished(here.request([HASHES[place]]), [FROM[place]]))
    here.step()
    requests = [there.request([HASHES[place]], handles[place]) for place in range(len(FROM))]
    for place, request in enumerate(requests):
        assert there.match(request) == 1
        there.load(request, [TO[place]])
    for request in requests:
        there.wait_loaded(request)
    assert sorted(there.loaded) == sorted(request.seq_id for request in requests)
    assert not there.bad
    for ours, theirs in zip(there.content(TO), here.content(FROM), strict=True):
        assert torch.equal(ours, theirs)


def test_it_ends_with_work_under_way_and_twice(nodes: Nodes) -> None:
    """What was offered is saved in the time that there is; no thread is left."""
    with no_thread_is_left():
        here, there = nodes.start_both()
        request = there.request(HASHES, hand_on(here))
        if there.match(request):
            there.load(request, TO)
        for node in (here, there):
            node.connector.worker.shutdown(10.0)
            node.connector.worker.shutdown(0.0)


def test_it_ends_unused(nodes: Nodes) -> None:
    with no_thread_is_left():
        node = nodes.start()
        node.connector.worker.shutdown(0.0)
