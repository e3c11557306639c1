"""The memory that holds the KV blocks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from server.errors import ConfigError
from server.kernels import huge_pages


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of one block, the same on the device, on the wire and on disk."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        per_token = self.num_layers * self.num_kv_heads * 2 * self.head_dim * self.dtype.itemsize
        return per_token * self.block_size


def num_blocks_for(geometry: KVGeometry, nbytes: int, *, extra: int = 0) -> int:
    """Blocks that fit a budget in bytes, the null block included.

    Args: extra: bytes that proposers keep for each block.
    Raises: ConfigError if not even one usable block fits.
    """
    block_nbytes = geometry.block_nbytes + extra
    num_blocks = nbytes // block_nbytes
    if num_blocks < 2:
        raise ConfigError(
            f"the KV cache has {nbytes} bytes, but the smallest useful one has {2 * block_nbytes} "
            f"(2 blocks of {geometry.block_size} tokens); raise kv_cache_memory_bytes or free some memory"
        )
    return num_blocks


def allocate_kv(geometry: KVGeometry, num_blocks: int, device: torch.device) -> Tensor:
    """[num_blocks, layers, kv_heads, block_size, 2 * head_dim], zeroed: stale NaN would outlive its mask."""
    shape = (num_blocks, geometry.num_layers, geometry.num_kv_heads, geometry.block_size, 2 * geometry.head_dim)
    if device.type == "cpu":
        return huge_pages.zeros(shape, geometry.dtype)
    return torch.zeros(shape, dtype=geometry.dtype, device=device)
