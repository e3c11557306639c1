"""How many blocks the KV cache has."""

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from proposers.base import HostProposer, Proposer
from server.composition.target import LoadedTarget
from server.config import Config
from server.host import available_memory_nbytes
from server.worker.kv_tensors import KVGeometry, allocate_kv, num_blocks_for
from server.worker.memory import activation_nbytes, kept_nbytes, kv_budget
from server.worker.runner import Runner

logger = logging.getLogger(__name__)


def num_kv_blocks(
    config: Config,
    target: LoadedTarget,
    proposers: Sequence[Proposer | HostProposer],
    build_runner: Callable[[Tensor], Runner],
    capture_sizes: Sequence[int],
) -> int:
    """As many blocks as there is memory for, the null block included.

    Args:
        build_runner: on a KV tensor.
        capture_sizes: batches that graphs are captured for; empty where none are.
    Raises: ConfigError if there is not enough for one.
    """
    loaded, geometry, device = target.loaded, target.geometry, target.device
    num_drafts = 0 if target.speculative is None else target.speculative.num_speculative_tokens
    working = activation_nbytes(
        config.scheduler.max_num_batched_tokens,
        config.scheduler.max_num_seqs * (1 + num_drafts),
        loaded.config.hidden_size,
        # GPT-2 and its kin name it otherwise, or leave it to this default.
        getattr(loaded.config, "intermediate_size", None) or 4 * loaded.config.hidden_size,
        loaded.vocab_size,
    )
    if capture_sizes and config.cache.kv_cache_memory_bytes is None:
        working += _graph_nbytes(build_runner, geometry, capture_sizes, device)
    budget = kv_budget(config.cache, device, available_memory_nbytes(), working)
    return num_blocks_for(geometry, budget, extra=sum(getattr(each, "block_nbytes", 0) for each in proposers))


def _graph_nbytes(
    build_runner: Callable[[Tensor], Runner], geometry: KVGeometry, sizes: Sequence[int], device: torch.device
) -> int:
    """What a runner with captured graphs takes besides the KV cache: measured on one without a cache."""

    def capture() -> Runner:
        runner = build_runner(allocate_kv(geometry, 2, device))
        runner.capture(sizes)
        return runner

    started_s = time.monotonic()
    nbytes = kept_nbytes(device, capture)
    logger.info(
        "CUDA graphs for batches up to %d and the batch's state take %d MiB, measured in %.1f s",
        sizes[-1],
        nbytes >> 20,
        time.monotonic() - started_s,
    )
    return nbytes
