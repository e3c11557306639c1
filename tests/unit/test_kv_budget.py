"""How much memory the KV cache gets."""

import pytest
import torch

from server.config import CacheConfig
from server.errors import ConfigError
from server.worker.memory import CPU_LIMIT, GIB, activation_nbytes, kv_budget

CPU = torch.device("cpu")


def test_on_the_cpu_it_is_a_quarter_of_what_is_free_up_to_a_limit() -> None:
    assert kv_budget(CacheConfig(), CPU, GIB, 0) == GIB // 4
    assert kv_budget(CacheConfig(), CPU, 100 * GIB, 0) == CPU_LIMIT


def test_an_explicit_size_goes_first_but_must_be_there() -> None:
    asked = CacheConfig(kv_cache_memory_bytes=3 * GIB)
    assert kv_budget(asked, CPU, 4 * GIB, 0) == 3 * GIB
    with pytest.raises(ConfigError, match=f"{3 * GIB}, but only {2 * GIB} bytes"):
        kv_budget(asked, CPU, 2 * GIB, 0)


def test_activations_grow_with_tokens_and_logits() -> None:
    base = activation_nbytes(100, 10, 64, 256, 1000)
    assert activation_nbytes(200, 10, 64, 256, 1000) > base
    assert activation_nbytes(100, 20, 64, 256, 1000) > base
