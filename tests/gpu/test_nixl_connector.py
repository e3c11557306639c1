"""KV by NIXL from and to the memory of a GPU; the other process has its own on the same one."""

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch

from connectors.nixl.blocks import NixlBlocks
from connectors.nixl.sums import word_sums
from tests.fakes.kv_node import KVNode
from tests.fakes.kv_process import KVProcess

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed"),
]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def reader_on(stack: ExitStack, device: str, block_size: int = 4) -> KVNode:
    """A node that wants blocks."""
    made = KVNode(connector="nixl", engine_id="reader", draft="d", device=device, block_size=block_size)
    stack.callback(made.close)
    return made


@pytest.fixture(scope="module", params=["cuda", "cpu"])
def holder(request: pytest.FixtureRequest) -> Iterator[KVProcess]:
    """A process with blocks."""
    made = KVProcess(seed=3, connector="nixl", engine_id="holder", draft="d", device=request.param)
    yield made
    made.close()


@pytest.fixture
def content(stack: ExitStack) -> KVNode:
    """A node that nobody reads from, with the same blocks."""
    made = KVNode(connector="nixl", draft="d")
    stack.callback(made.close)
    made.fill(3)
    return made


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_between_kinds_of_memory(stack: ExitStack, holder: KVProcess, content: KVNode, device: str) -> None:
    reader = reader_on(stack, device)
    for first in range(1, 6):
        handle = holder.hand_on(first, 9, first + 1)
        assert reader.wait_for_load(reader.begin(handle, 3, 1, 5)) == frozenset()
        assert torch.equal(reader.blocks[[3, 1, 5]].cpu(), content.blocks[[first, 9, first + 1]])
        assert torch.equal(reader.drafts[[3, 1, 5]].cpu(), content.drafts[[first, 9, first + 1]])
        assert reader.ended.complete == {3, 1, 5}
        holder.wait_for_release(handle)


def test_blocks_of_another_size(stack: ExitStack, holder: KVProcess, content: KVNode) -> None:
    reader = reader_on(stack, "cuda", block_size=6)
    request = reader.request(2, source=holder.hand_on(5, 2, 7))
    assert reader.matched(request) == 2
    reader.order(request, (1, 2))
    assert reader.wait_for_load(request.seq_id) == frozenset()
    expected = torch.cat(list(content.blocks[[5, 2, 7]]), dim=2)
    assert torch.equal(torch.cat(list(reader.blocks[[1, 2]].cpu()), dim=2), expected)


def test_a_block_that_has_changed_on_its_way(stack: ExitStack, holder: KVProcess) -> None:
    reader = reader_on(stack, "cuda")
    own_sums = NixlBlocks.own_sums

    def flip(self: NixlBlocks, read: torch.Tensor, use_words: bool) -> list[int]:
        read[1, 7] ^= 1
        return own_sums(self, read, use_words)

    with patch.object(NixlBlocks, "own_sums", flip):
        assert reader.wait_for_load(reader.begin(holder.hand_on(4, 5, 6), 1, 2, 3)) == {2}
    assert not reader.blocks[2].any()


def test_blocks_are_written_behind_what_is_queued(stack: ExitStack, holder: KVProcess, content: KVNode) -> None:
    reader = reader_on(stack, "cuda")
    handle = holder.hand_on(4, 5)
    torch.cuda._sleep(200_000_000)
    reader.blocks[1:3].fill_(7.0)  # by a step that was launched before the load was ordered
    assert reader.wait_for_load(reader.begin(handle, 1, 2)) == frozenset()
    torch.cuda.synchronize()
    assert torch.equal(reader.blocks[1:3].cpu(), content.blocks[4:6])


def test_a_device_and_the_host_agree_on_sums() -> None:
    blocks = torch.randint(0, 256, (5, 4096), dtype=torch.uint8)
    assert word_sums(blocks.cuda()) == word_sums(blocks)
