"""Copies of blocks that are made layer by layer, and when they are of use."""

import threading
from collections.abc import Iterator

import pytest
import torch

from connectors.base import BlockSave
from connectors.layer_stages import LayerStages, StagedBlock
from tests.fakes.thread_watch import no_thread_is_left

NUM_LAYERS = 3
SAVES = [BlockSave(number, bytes([number]) * 32, number) for number in range(6)]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def blocks_of(device: str = "cpu") -> torch.Tensor:
    return torch.randn(6, NUM_LAYERS, 2, 4, 8, device=device).bfloat16()


def content(blocks: torch.Tensor, block_id: int) -> bytes:
    return blocks[block_id].cpu().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def blocks() -> torch.Tensor:
    return blocks_of()


@pytest.fixture
def stages(blocks: torch.Tensor) -> Iterator[LayerStages]:
    made = LayerStages(blocks)
    yield made
    assert made.close(10.0)


def run_step(stages: LayerStages, announced: list[BlockSave], num_layers: int = NUM_LAYERS) -> None:
    """One that fails in front of the layer behind the last of these."""
    stages.begin(announced)
    for layer in range(num_layers):
        stages.copy(layer)
    stages.end()


def claimed(stages: LayerStages, save: BlockSave) -> StagedBlock:
    staged = stages.claim(save)
    assert staged is not None
    return staged


def finish(stages: LayerStages) -> None:
    """Wait until all that was offered is copied."""
    finished = threading.Event()
    stages._thread.submit(finished.set)
    assert finished.wait(30.0)


def whole(staged: StagedBlock) -> bytes:
    assert staged.data is not None
    return bytes(staged.data)


@DEVICES
def test_a_copy_is_the_block_as_it_was_when_its_layers_were_offered(device: str) -> None:
    blocks = blocks_of(device)
    expected = [content(blocks, block_id) for block_id in range(6)]
    stages = LayerStages(blocks)
    run_step(stages, SAVES[2:4])
    staged = [claimed(stages, save) for save in SAVES[2:4]]
    finish(stages)
    assert [whole(each) for each in staged] == expected[2:4]
    blocks.zero_()
    assert [whole(each) for each in staged] == expected[2:4]
    assert stages.close(10.0)


def test_a_copy_that_lacks_a_layer_is_none(stages: LayerStages) -> None:
    run_step(stages, SAVES[:1], num_layers=NUM_LAYERS - 1)
    staged = claimed(stages, SAVES[0])
    finish(stages)
    assert staged.progress.num_left == 1
    assert staged.data is None


def test_only_what_was_announced_is_copied_and_claimed_once(stages: LayerStages) -> None:
    run_step(stages, SAVES[:1])
    assert stages.claim(SAVES[1]) is None
    assert stages.claim(BlockSave(0, SAVES[0].block_hash)) is None, "it was filled by something else since"
    assert claimed(stages, SAVES[0]).block_id == 0
    assert stages.claim(SAVES[0]) is None


def test_what_is_not_claimed_soon_is_dropped(stages: LayerStages) -> None:
    run_step(stages, SAVES[:1])
    run_step(stages, SAVES[1:2])
    assert stages.claim(SAVES[0]) is not None, "steps overlap: it may be offered with the second one behind it"
    run_step(stages, [])
    run_step(stages, [])
    assert stages.claim(SAVES[1]) is None


def test_a_step_without_announcements_copies_nothing() -> None:
    with no_thread_is_left():
        stages = LayerStages(blocks_of())
        run_step(stages, [])
        stages.copy(0)
        assert stages.close(0.0)


def test_there_are_only_so_many_copies_at_a_time(blocks: torch.Tensor) -> None:
    stages = LayerStages(blocks, max_nbytes=3 * len(content(blocks, 0)))
    run_step(stages, SAVES[:2])
    kept = [claimed(stages, save) for save in SAVES[:2]]
    run_step(stages, SAVES[2:5])
    assert [stages.claim(save) is not None for save in SAVES[2:5]] == [True, False, False]
    finish(stages)
    assert [whole(each) for each in kept] == [content(blocks, 0), content(blocks, 1)]
    kept.clear()
    run_step(stages, SAVES[2:5])
    assert all(stages.claim(save) is not None for save in SAVES[2:5])
    assert stages.close(10.0)
