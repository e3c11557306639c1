"""KV over TCP from and to the memory of a GPU."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from connectors.tcp.blocks import NUM_STAGES
from tests.fakes.kv_node import KVNode

pytestmark = pytest.mark.gpu

NUM_BLOCKS = 2 * NUM_STAGES


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def node(stack: ExitStack, name: str, device: str, block_size: int = 4) -> KVNode:
    made = KVNode(engine_id=name, draft="d", device=device, num_blocks=NUM_BLOCKS, block_size=block_size)
    stack.callback(made.close)
    return made


KINDS = pytest.mark.parametrize(("theirs", "ours"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])


@KINDS
def test_between_kinds_of_memory(stack: ExitStack, theirs: str, ours: str) -> None:
    """Loads at a time that together want more blocks than there is staging memory for."""
    producer, consumer = node(stack, "producer", theirs), node(stack, "consumer", ours)
    content = producer.fill()
    places = [tuple(range(start, NUM_BLOCKS, 4)) for start in range(4)]
    loads = [consumer.begin(producer.hand_on(*each), *each) for each in places]
    for seq_id in loads:
        assert consumer.wait_for_load(seq_id) == frozenset()
    assert torch.equal(consumer.blocks.cpu(), content.cpu())
    assert torch.equal(consumer.drafts.cpu(), producer.drafts.cpu())
    assert consumer.ended.complete == set(range(NUM_BLOCKS))


@KINDS
def test_blocks_of_another_size(stack: ExitStack, theirs: str, ours: str) -> None:
    producer, consumer = node(stack, "producer", theirs, 4), node(stack, "consumer", ours, 6)
    content = producer.fill()
    assert consumer.wait_for_load(consumer.begin(producer.hand_on(0, 1, 2), 8, 9)) == frozenset()
    sent = content[:3].permute(1, 2, 0, 3, 4).flatten(2, 3)
    assert torch.equal(consumer.blocks[8:10].permute(1, 2, 0, 3, 4).flatten(2, 3).cpu(), sent.cpu())


def test_what_is_loaded_comes_behind_what_is_queued(stack: ExitStack) -> None:
    """The blocks may still be read, and written to, by steps that were launched before."""
    producer, consumer = node(stack, "producer", "cpu"), node(stack, "consumer", "cuda")
    content = producer.fill()
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        busy = busy @ busy
        busy /= busy.norm()
    consumer.blocks.fill_(busy[0, 0])
    assert consumer.wait_for_load(consumer.begin(producer.hand_on(0, 1), 0, 1)) == frozenset()
    assert torch.equal(consumer.blocks[:2].cpu(), content[:2])
