"""Whether tokens are drawn, and drafts verified, by C++ operators."""

import functools

import torch

from server.kernels import cpu_sampling
from server.model.cache import cache_root


@functools.cache
def has_sampling_operators(device: torch.device) -> bool:
    """Whether there are such operators for tensors of a device; asked for the first time, they are built if need be."""
    return device.type == "cpu" and cpu_sampling.load(cache_root() / "kernels")
