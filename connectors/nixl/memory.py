"""Where the blocks of a node lie, as NIXL is told of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Region:
    """Blocks of one size, one behind the other.

    Attributes:
        address: of the first, in the memory of the process that has them.
        stride: from the beginning of a block to that of the next, in bytes.
    """

    address: int
    block_nbytes: int
    num_blocks: int
    stride: int

    @classmethod
    def of(cls, blocks: Tensor) -> "Region":
        """Args: blocks: [num_blocks, ...], each block contiguous."""
        return cls(
            blocks.data_ptr(),
            blocks[0].numel() * blocks.element_size(),
            blocks.shape[0],
            blocks.stride(0) * blocks.element_size(),
        )

    @property
    def nbytes(self) -> int:
        """From the first byte of the first block to the last byte of the last."""
        return (self.num_blocks - 1) * self.stride + self.block_nbytes


@dataclass(frozen=True, slots=True)
class Place:
    """The kind of memory. Attributes: device_id: of the GPU, or 0."""

    is_on_device: bool
    device_id: int

    @classmethod
    def of(cls, blocks: Tensor) -> "Place":
        """Where these blocks are."""
        return cls(blocks.device.type != "cpu", blocks.device.index or 0)

    @property
    def kind(self) -> str:
        """NIXL's name for it."""
        return "VRAM" if self.is_on_device else "DRAM"


def strided(regions: Sequence[Region], place: Place) -> NDArray[np.uint64]:
    """Every block of every region as a descriptor: [regions, 5] of address, bytes, device, stride, count.

    Descriptors are numbered on from one region to the next.
    """
    rows = [(r.address, r.block_nbytes, place.device_id, r.stride, r.num_blocks) for r in regions]
    return np.array(rows, dtype=np.uint64)


def first_descriptors(regions: Sequence[Region]) -> list[int]:
    """The number of each region's first descriptor."""
    firsts = [0]
    for region in regions:
        firsts.append(firsts[-1] + region.num_blocks)
    return firsts[:-1]
