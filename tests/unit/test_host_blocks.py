"""Blocks as bytes in host memory."""

import pytest
import torch

from connectors.host_blocks import HostBlocks


def blocks_of(device: str) -> torch.Tensor:
    return torch.arange(5 * 2 * 3, dtype=torch.bfloat16, device=device).view(5, 2, 3)


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
def test_a_block_is_read_and_written_as_its_bytes(device: str) -> None:
    blocks = blocks_of(device)
    host = HostBlocks(blocks, num_threads=2)
    host.mark()
    with host.reading(3) as data:
        assert data.nbytes == 2 * 3 * 2
        assert bytes(data) == blocks[3].cpu().view(torch.uint8).numpy().tobytes()
        taken = bytes(data)
    with host.writing(1) as buffer:
        buffer[:] = taken
    expected = blocks_of("cpu")
    expected[1] = expected[3]
    assert torch.equal(blocks.cpu(), expected), "the block it was written to, and no other"


@DEVICES
def test_so_is_a_part_of_a_block(device: str) -> None:
    blocks = blocks_of(device)
    host = HostBlocks(blocks, num_threads=1)
    host.mark()
    with host.reading(3, slice(4, 8)) as data:
        assert bytes(data) == blocks[3].cpu().view(torch.uint8).numpy().tobytes()[4:8]
        taken = bytes(data)
    with host.writing(1, slice(4, 8)) as buffer:
        buffer[:] = taken
    expected = blocks_of("cpu")
    expected[1].flatten()[2:4] = expected[3].flatten()[2:4]
    assert torch.equal(blocks.cpu(), expected)


def test_blocks_in_host_memory_are_not_copied() -> None:
    blocks = blocks_of("cpu")
    host = HostBlocks(blocks, num_threads=1)
    with host.reading(2) as data:
        blocks[2] = 0
        assert not any(data)


@pytest.mark.gpu
def test_whoever_fails_gives_its_buffer_back() -> None:
    host = HostBlocks(blocks_of("cuda"), num_threads=1)

    def fail() -> None:
        with host.writing(1):
            raise OSError("broken")

    for _ in range(2):  # there is one buffer
        with pytest.raises(OSError, match="broken"):
            fail()
