"""Copies between host and device that never wait for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Transfer:
    """Uploads lists and downloads tensors of one device; on the CPU both are plain copies.

    For what few steps need: each copy takes memory of its own. What every step needs goes through `Flight`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"

    def upload(self, values: Sequence[int] | Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        """A device tensor of host values; the pinned source is kept alive by the caching allocator."""
        host = torch.tensor(values, dtype=dtype, pin_memory=self._is_cuda)
        return host.to(self.device, non_blocking=True)

    def upload_ids(self, values: Sequence[int]) -> Tensor:
        """A device tensor of int64 indices."""
        return self.upload(values, torch.int64)

    def download(self, tensor: Tensor) -> Tensor:
        """A host copy, valid once an event recorded after this call has passed."""
        if not self._is_cuda:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
