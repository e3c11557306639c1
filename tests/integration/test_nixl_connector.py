"""KV between nodes by NIXL: agents that read each other's memory, most of them in processes of their own."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from connectors.nixl.agent import NixlAgent
from connectors.nixl.blocks import NixlBlocks
from connectors.nixl.connector import NixlConfig
from connectors.nixl.session import NixlSession
from connectors.nixl.transports import with_device_memory
from connectors.peer.leases import LeaseTable
from server.errors import ConfigError
from tests.fakes.kv_node import KVNode
from tests.fakes.kv_process import KVProcess
from tests.fakes.thread_watch import no_thread_is_left

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")

TCP: dict[str, Any] = {"connector": "nixl", "transports": "tcp"}
"""As between two machines: a read goes on by itself, and stops where the other process does."""
SLOW: dict[str, Any] = {**TCP, "num_blocks": 48, "width": 1 << 15, "staging_bytes": 12 << 20, "num_threads": 1}
"""Blocks of 3 MiB, two at a time: 144 MiB in all, which take a while."""
EVERYTHING = tuple(range(48))


@pytest.fixture
def nodes() -> Iterator[ExitStack]:
    """Closes what is entered; no thread is left."""
    with no_thread_is_left(), ExitStack() as stack:
        yield stack


def node(stack: ExitStack, **settings: Any) -> KVNode:
    """A node until the end of the test."""
    made = KVNode(**{**TCP, "engine_id": "reader", **settings})
    stack.callback(made.close)
    return made


def process(stack: ExitStack, **settings: Any) -> KVProcess:
    """A process until the end of the test."""
    made = KVProcess(**{**TCP, "engine_id": "holder", **settings})
    stack.callback(made.close)
    return made


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """For what other threads and processes do. Raises: TimeoutError."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError
        time.sleep(0.001)


def free_port() -> int:
    """One that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def big() -> Iterator[KVProcess]:
    """A process with blocks that take a while."""
    with ExitStack() as stack:
        yield process(stack, **SLOW)


@pytest.fixture(scope="module")
def holder() -> Iterator[KVProcess]:
    """A process that nothing is done to."""
    with ExitStack() as stack:
        yield process(stack, seed=3, draft="d")


def content(seed: int, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What `KVNode.fill` makes of a seed."""
    with ExitStack() as stack:
        made = node(stack, **settings, is_producer=False)
        made.fill(seed)
        return made.blocks, made.drafts


def test_blocks_come_from_the_memory_of_another_process(nodes: ExitStack, holder: KVProcess) -> None:
    reader = node(nodes, draft="d")
    blocks, drafts = content(3, draft="d")
    for first in range(1, 11):
        handle = holder.hand_on(first + 4, first, first + 2)
        assert reader.wait_for_load(reader.begin(handle, 7, 2, 9)) == frozenset()
        assert torch.equal(reader.blocks[[7, 2, 9]], blocks[[first + 4, first, first + 2]])
        assert torch.equal(reader.drafts[[7, 2, 9]], drafts[[first + 4, first, first + 2]])
        assert reader.ended.complete == {7, 2, 9}
        holder.wait_for_release(handle)


def test_with_the_checksum_of_devices(nodes: ExitStack, holder: KVProcess) -> None:
    reader = node(nodes, draft="d")
    blocks, _ = content(3, draft="d")
    own_sums = NixlBlocks.own_sums

    def flip(self: NixlBlocks, read: torch.Tensor, use_words: bool) -> list[int]:
        read[1, 7] ^= 1
        return own_sums(self, read, use_words)

    with patch.object(NixlSession, "use_words", True):
        assert reader.wait_for_load(reader.begin(holder.hand_on(4, 5, 6), 1, 2, 3)) == frozenset()
        with patch.object(NixlBlocks, "own_sums", flip):
            assert reader.wait_for_load(reader.begin(holder.hand_on(4, 5, 6), 4, 5, 6)) == {5}
    assert torch.equal(reader.blocks[[1, 2, 3, 4, 6]], blocks[[4, 5, 6, 4, 6]])


@pytest.mark.parametrize("transports", ["tcp", "all"])
def test_many_loads_at_a_time(nodes: ExitStack, holder: KVProcess, transports: str) -> None:
    reader = node(nodes, num_blocks=81, transports=transports)
    blocks, _ = content(3, draft="d")
    handles = [holder.hand_on(1 + index % 7, 8 + index % 7) for index in range(40)]
    loads = [reader.begin(handle, 1 + 2 * index, 2 + 2 * index) for index, handle in enumerate(handles)]
    for index, load in enumerate(loads):
        assert reader.wait_for_load(load) == frozenset()
        expected = blocks[[1 + index % 7, 8 + index % 7]]
        assert torch.equal(reader.blocks[1 + 2 * index : 3 + 2 * index], expected)
    for handle in handles:
        holder.wait_for_release(handle)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8, 24])
def test_blocks_of_another_size_are_cut_anew(nodes: ExitStack, holder: KVProcess, size: int) -> None:
    reader = node(nodes, block_size=size, num_blocks=26, staging_bytes=1 << 16)
    tokens = torch.cat(list(content(3, draft="d")[0][[9, 1, 5, 2, 11, 3]]), dim=2)
    count = 24 // size
    handle = holder.hand_on(9, 1, 5, 2, 11, 3)
    request = reader.request(count, source=handle)
    skipped = min(1, count - 1)
    assert reader.matched(request, skipped) == count - skipped
    reader.order(request, tuple(range(1, 1 + count - skipped)), skipped)
    assert reader.wait_for_load(request.seq_id) == frozenset()
    found = torch.cat(list(reader.blocks[1 : 1 + count - skipped]), dim=2)
    assert torch.equal(found, tokens[:, :, skipped * size :])
    holder.wait_for_release(handle)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_kv_of_other_tokens_is_not_given(nodes: ExitStack, size: int) -> None:
    holder = node(nodes, engine_id="holder")
    reader = node(nodes, block_size=size, num_blocks=26, staging_bytes=1 << 16)
    holder.fill()
    block_ids = range(1, 1 + 16 // size)
    handle = holder.hand_on(9, 1, 5, 2, text="secret")
    assert reader.wait_for_load(reader.begin(handle, *block_ids)) == set(block_ids)
    assert not reader.blocks.any()


def test_a_draft_that_the_other_node_does_not_have_is_left_out(nodes: ExitStack, holder: KVProcess) -> None:
    reader = node(nodes, draft="another")
    blocks, _ = content(3, draft="d")
    assert reader.wait_for_load(reader.begin(holder.hand_on(4, 5), 1, 2)) == frozenset()
    assert torch.equal(reader.blocks[[1, 2]], blocks[[4, 5]])
    assert reader.ended.complete == set()
    assert not reader.drafts.any()


def test_drafts_of_some_blocks_only(nodes: ExitStack) -> None:
    holder, reader = node(nodes, engine_id="holder", draft="d"), node(nodes, draft="d")
    holder.fill(5)
    holder.whole_drafts.discard(4)
    assert reader.wait_for_load(reader.begin(holder.hand_on(3, 4, 5), 1, 2, 3)) == frozenset()
    assert torch.equal(reader.blocks[1:4], holder.blocks[3:6])
    assert reader.ended.complete == {1, 3}
    assert torch.equal(reader.drafts[[1, 3]], holder.drafts[[3, 5]])
    assert not reader.drafts[2].any()


def test_drafts_of_no_block(nodes: ExitStack) -> None:
    """Nothing is stored then: an empty copy on a device fails."""
    holder, reader = node(nodes, engine_id="holder", draft="d"), node(nodes, draft="d")
    holder.fill(5)
    holder.whole_drafts.clear()
    store, stored = NixlBlocks.store, list[int]()

    def recorded(self: NixlBlocks, group: int, block_ids: Sequence[int], content: torch.Tensor) -> None:
        stored.append(group)
        store(self, group, block_ids, content)

    with patch.object(NixlBlocks, "store", recorded):
        assert reader.wait_for_load(reader.begin(holder.hand_on(3, 4, 5), 1, 2, 3)) == frozenset()
    assert set(stored) == {0}
    assert torch.equal(reader.blocks[1:4], holder.blocks[3:6])
    assert reader.ended.complete == set()


def test_a_block_that_has_changed_on_its_way_is_bad(nodes: ExitStack, holder: KVProcess) -> None:
    reader = node(nodes, draft="d")
    blocks, drafts = content(3, draft="d")
    own_sums = NixlBlocks.own_sums

    def flip(self: NixlBlocks, read: torch.Tensor, use_words: bool) -> list[int]:
        if read.shape[1] == reader.blocks[0].nbytes:
            read[1, 100] ^= 1  # the target's second block
        else:
            read[2, 3] ^= 128  # the draft's third
        return own_sums(self, read, use_words)

    with patch.object(NixlBlocks, "own_sums", flip):
        assert reader.wait_for_load(reader.begin(holder.hand_on(4, 5, 6), 1, 2, 3)) == {2}
    assert torch.equal(reader.blocks[[1, 3]], blocks[[4, 6]])
    assert not reader.blocks[2].any()
    assert reader.ended.complete == {1}
    assert torch.equal(reader.drafts[1], drafts[4])


def test_kv_of_another_fingerprint_is_refused_on_both_sides(nodes: ExitStack, holder: KVProcess) -> None:
    reader = node(nodes, fingerprint="b2")
    assert reader.matched(reader.request(2, source=holder.hand_on(1, 2))) == 0
    lying = replace(holder.hand_on(1, 2), fingerprint="b2")
    before = reader.blocks.clone()
    assert reader.wait_for_load(reader.begin(lying, 1, 2)) == {1, 2}
    assert torch.equal(reader.blocks, before)


def test_a_lease_that_was_ended_is_not_read_from(nodes: ExitStack, holder: KVProcess) -> None:
    reader = node(nodes)
    handle = holder.hand_on(1, 2)
    holder.cancel(handle)
    holder.wait_for_release(handle)
    assert reader.wait_for_load(reader.begin(handle, 1, 2)) == {1, 2}
    assert not reader.blocks.any()


def test_a_lease_that_ends_while_it_is_read_from_spoils_what_was_read(nodes: ExitStack) -> None:
    holder, reader = node(nodes, engine_id="holder"), node(nodes)
    holder.fill(5)
    handle = holder.hand_on(1, 2)
    own_sums = NixlBlocks.own_sums

    def late(self: NixlBlocks, read: torch.Tensor, use_words: bool) -> list[int]:
        assert torch.equal(read.view(torch.float32).view(2, -1), holder.blocks[1:3].flatten(1))
        return own_sums(self, read, use_words)

    def ended(self: NixlBlocks, *_: object) -> list[int | None]:
        holder.scheduler.cancel(holder.sequences[handle.lease_id])
        return [0, 0]

    with patch.object(NixlBlocks, "own_sums", late), patch.object(NixlBlocks, "sums", ended):
        assert reader.wait_for_load(reader.begin(handle, 1, 2)) == {1, 2}
    holder.wait_for_release(handle)
    assert not reader.blocks.any()


@pytest.mark.parametrize("num_come", [0, 2, 30])
def test_a_load_that_is_cancelled_leaves_its_blocks_alone(nodes: ExitStack, big: KVProcess, num_come: int) -> None:
    reader = node(nodes, **SLOW)
    handle = big.hand_on(*EVERYTHING)
    load = reader.begin(handle, *EVERYTHING)
    wait_until(lambda: num_come == 0 or bool(reader.blocks[num_come - 1].any()))
    reader.scheduler.cancel(load)
    assert reader.wait_for_load(load)
    left = reader.blocks.clone()
    big.wait_for_release(handle)
    assert reader.wait_for_load(reader.begin(big.hand_on(5), 0)) == frozenset()  # what was on its way has come by now
    assert torch.equal(reader.blocks[1:], left[1:])


def test_a_node_that_is_killed_while_it_is_read_from(nodes: ExitStack) -> None:
    port = free_port()
    holder = process(nodes, **SLOW, port=port)
    reader = node(nodes, **SLOW, transfer_timeout_seconds=60.0)  # for longer than anybody waits here
    load = reader.begin(holder.hand_on(*EVERYTHING), *EVERYTHING)
    unused = holder.hand_on(1)
    wait_until(lambda: bool(reader.blocks[1].any()))
    holder.signal(signal.SIGKILL)
    bad = reader.wait_for_load(load)
    assert 47 in bad
    good = [block_id for block_id in EVERYTHING if block_id not in bad]
    assert torch.equal(reader.blocks[good], content(0, **SLOW)[0][good])
    assert not reader.blocks[list(bad)].any()

    again = process(nodes, **SLOW, port=port, engine_id="holder-2", seed=1)
    assert reader.wait_for_load(reader.begin(unused, 1)) == {1}, "its node is not this one"
    assert reader.wait_for_load(reader.begin(again.hand_on(8, 9), 1, 2)) == frozenset()
    assert torch.equal(reader.blocks[1:3], content(1, **SLOW)[0][8:10])


def test_a_node_that_is_stopped_while_it_is_read_from(nodes: ExitStack, big: KVProcess, holder: KVProcess) -> None:
    reader = node(nodes, **SLOW, transfer_timeout_seconds=3.0)
    load = reader.begin(big.hand_on(*EVERYTHING), *EVERYTHING)
    wait_until(lambda: bool(reader.blocks[1].any()))
    big.signal(signal.SIGSTOP)
    other = node(nodes, engine_id="other", num_blocks=48)
    before = other.begin(holder.hand_on(1), 1)
    assert other.wait_for_load(before) == frozenset()
    assert 47 in reader.wait_for_load(load)
    left = reader.blocks.clone()
    big.signal(signal.SIGCONT)
    assert reader.wait_for_load(reader.begin(big.hand_on(5), 0)) == frozenset()
    assert torch.equal(reader.blocks[1:], left[1:]), "bytes that came late are in nobody's blocks"


def test_what_a_node_has_held_that_is_gone_is_free_in_time(nodes: ExitStack) -> None:
    holder = node(nodes, engine_id="holder", peer_timeout_seconds=0.5)
    handle = holder.hand_on(1, 2)
    reader = process(nodes, engine_id="reader")
    with patch.object(LeaseTable, "renew", autospec=True, side_effect=LeaseTable.renew) as renewed:
        reader.hold(handle)
        wait_until(lambda: renewed.called)
    reader.signal(signal.SIGKILL)
    holder.wait_for_release(handle)


def test_a_lease_that_nobody_reads_ends(nodes: ExitStack) -> None:
    holder = node(nodes, engine_id="holder", lease_seconds=0.2)
    holder.wait_for_release(holder.hand_on(1))


def test_a_host_that_is_not_allowed_is_not_asked(nodes: ExitStack, holder: KVProcess) -> None:
    reader = node(nodes, allowed_peers=["10.0.0.0/8"])
    assert reader.matched(reader.request(1, source=holder.hand_on(1))) == 0


def test_what_ucx_is_told() -> None:
    with pytest.raises(ConfigError, match="must leave tcp in"):
        NixlConfig(transports="rc,cuda")
    with pytest.raises(ConfigError, match="must leave tcp in"):
        NixlConfig(transports="^tcp")
    assert [NixlConfig(transports=names).transports for names in ("all", "rc,tcp", "^cma")] == ["all", "rc,tcp", "^cma"]


@pytest.mark.parametrize("named", ["tcp", None])
def test_ucx_is_told_of_device_memory(named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL starts on a machine with a GPU, whether the transports are ours or the environment's."""
    gpu = tmp_path / "0000:01:00.0"
    gpu.mkdir()
    (gpu / "vendor").write_text("0x10de")
    (gpu / "class").write_text("0x030200")
    monkeypatch.setenv("UCX_TLS", "all" if named else "tcp")
    with patch("connectors.nixl.agent.with_device_memory", partial(with_device_memory, pci_devices=tmp_path)):
        agent = NixlAgent(net_devices=None, transports=named, device=torch.device("cpu"))
    agent.close(1.0)
    assert os.environ["UCX_TLS"] == "tcp,cuda_copy"


def test_without_nixl_the_error_says_what_to_install(nodes: ExitStack) -> None:
    with patch("importlib.util.find_spec", lambda _: None), pytest.raises(ConfigError, match=r"outrider\[nixl\]"):
        node(nodes)
