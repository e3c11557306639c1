"""How much memory the KV cache may take."""

import gc
from collections.abc import Callable

import torch

from server.config import CacheConfig
from server.errors import ConfigError

GIB = 1 << 30
CPU_LIMIT = 2 * GIB
FLOAT32_NBYTES = 4
LOGITS_COPIES = 4
"""Float32 tensors of the logits' shape that are alive at once: raw, processed, sorted, probabilities."""
ACTIVATION_COPIES = 6
"""Tensors of the widest activation's shape that are alive at once in a decoder layer."""


def activation_nbytes(num_tokens: int, num_logits: int, hidden: int, intermediate: int, vocab_size: int) -> int:
    """An upper estimate of what a step needs besides weights and KV.

    Args: num_tokens: most in a step. num_logits: most rows of logits in a step.
    """
    widest = max(hidden, intermediate)
    return FLOAT32_NBYTES * (ACTIVATION_COPIES * num_tokens * widest + LOGITS_COPIES * num_logits * vocab_size)


def kept_nbytes(device: torch.device, work: Callable[[], object]) -> int:
    """Device memory that some work's result keeps, graphs included: what is free again once it is dropped. CUDA only.

    What the work leaves elsewhere, as proposers keep what they were last bound to, is in use and no part of it.
    """
    kept = work()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    during, _ = torch.cuda.mem_get_info(device)
    del kept
    gc.collect()
    torch.cuda.empty_cache()
    after, _ = torch.cuda.mem_get_info(device)
    return max(0, after - during)


def kv_budget(config: CacheConfig, device: torch.device, host_available: int, working: int) -> int:
    """Bytes for the KV cache, once the weights are loaded.

    An explicit size goes first. On CUDA it is what `gpu_memory_utilization` leaves after what is in
    use and what is `working`: activations, batch state and graphs. On the CPU it is a quarter of the
    free memory, at most 2 GiB.

    Raises: ConfigError if an explicit size is more than what is free.
    """
    free, total = (host_available, 0) if device.type == "cpu" else torch.cuda.mem_get_info(device)
    if config.kv_cache_memory_bytes is not None:
        if config.kv_cache_memory_bytes > free:
            raise ConfigError(
                f"kv_cache_memory_bytes is {config.kv_cache_memory_bytes}, but only {free} bytes are free on {device}"
            )
        return config.kv_cache_memory_bytes
    if device.type == "cpu":
        return min(CPU_LIMIT, free // 4)
    return int(config.gpu_memory_utilization * total) - (total - free) - working
