"""Copies of blocks that are made layer by layer, while the step that fills the blocks computes their next layers."""

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from connectors.base import BlockSave
from connectors.threads import Threads

MAX_NBYTES = 256 << 20
"""Of all copies; blocks beyond are read behind their step."""
_STEPS_TO_SAVE = 2
"""Metadata in which a block may be offered, counted from the one that announced it: steps overlap by one."""


@dataclass(eq=False, slots=True)
class _Progress:
    """Of a step's copies. Attributes: num_left: layers that are not in them; only the copying thread writes it."""

    num_left: int


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class StagedBlock:
    """A copy of a block in host memory. Attributes: layers: [layers, nbytes of a layer] uint8."""

    block_id: int
    layers: Tensor
    progress: _Progress

    @property
    def data(self) -> memoryview | None:
        """The block's bytes; None if the copy lacks some of them, perhaps for ever, as the step has failed."""
        return None if self.progress.num_left else self.layers.flatten().numpy().data


class LayerStages:
    """Copies of a group's blocks, made on a thread of its own; all methods are the step thread's.

    A copy says nothing of what it is worth: it is complete once all layers were offered, and of use to whoever knows
    that the block has settled. Until then a block may be given to somebody else, who writes to it while it is read:
    then it was not offered for saving, so nobody claims the copy.
    """

    def __init__(self, blocks: Tensor, max_nbytes: int = MAX_NBYTES) -> None:
        """Args: blocks: [num_blocks, layers, ...], each block contiguous."""
        self._blocks = blocks.flatten(2).view(torch.uint8)
        self._host = self._blocks.numpy() if blocks.device.type == "cpu" else None
        self._max_blocks = max_nbytes // self._blocks[0].numel()
        self._stream = None if self._host is not None else torch.cuda.Stream(blocks.device)
        self._thread = Threads("outrider-kv-layers", 1)
        self._alive: weakref.WeakSet[StagedBlock] = weakref.WeakSet()
        self._unclaimed: deque[dict[BlockSave, StagedBlock]] = deque(maxlen=_STEPS_TO_SAVE)
        self._filling: tuple[StagedBlock, ...] = ()

    def begin(self, announced: Sequence[BlockSave]) -> None:
        """The pass that follows fills these blocks, if there is one; to be called with all metadata, after `claim`."""
        num_layers = self._blocks.shape[1]
        progress = _Progress(num_layers)
        staged = {
            save: StagedBlock(save.block_id, self._empty(), progress)
            for save in announced[: max(0, self._max_blocks - len(self._alive))]
        }
        self._filling = tuple(staged.values())
        self._alive.update(self._filling)
        self._unclaimed.append(staged)

    def copy(self, layer: int) -> None:
        """A layer is queued on the device; each once, in any order."""
        if not self._filling:
            return
        written = None
        if self._stream is not None:
            written = torch.cuda.Event()
            written.record(torch.cuda.current_stream(self._stream.device))
        self._thread.submit(partial(self._copy, self._filling, layer, written))

    def end(self) -> None:
        """The pass is over."""
        self._filling = ()

    def claim(self, save: BlockSave) -> StagedBlock | None:
        """The copy of a block that has settled, now the caller's; None if there is none."""
        for staged in self._unclaimed:
            if save in staged:
                return staged.pop(save)
        return None

    def close(self, timeout_s: float) -> bool:
        """End the thread. Returns: whether it has ended; may be called twice."""
        return self._thread.end(timeout_s)

    def _empty(self) -> Tensor:
        return torch.empty(self._blocks.shape[1:], dtype=torch.uint8, pin_memory=self._stream is not None)

    def _copy(self, filling: Sequence[StagedBlock], layer: int, written: torch.cuda.Event | None) -> None:
        if self._host is not None:
            for block in filling:  # by numpy: torch would share this out among threads that compute
                np.copyto(block.layers[layer].numpy(), self._host[block.block_id, layer])
        else:
            assert self._stream is not None
            assert written is not None
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._stream.wait_event(written)
                for block in filling:
                    block.layers[layer].copy_(self._blocks[block.block_id, layer], non_blocking=True)
                done = torch.cuda.Event()
                done.record(self._stream)
            done.synchronize()
        filling[0].progress.num_left -= 1
