"""A KV cache in a narrower type than the model's: the answers are those of that rounding, however they come about."""

import random
from pathlib import Path

import pytest
import torch

from server.errors import ConfigError
from server.model.device import KV_DTYPES
from tests.fakes.engine_under_test import EngineUnderTest, engine_on, ngram
from tests.fakes.oracle import Oracle, ask_transformers
from tests.tiny_model import build_tiny_model

LIMIT = 192
TIE_GAPS = {"bfloat16": 1e-2, "fp8_e4m3": 0.1}
"""Where float32 is off by a bit, a key or value between two numbers of the cache's type falls to the other: that
moves logits by about as much."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("kv_dtype"))


@pytest.fixture(scope="module", params=TIE_GAPS)
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(folder: Path, device: str, dtype: torch.dtype, tie_gap: float) -> Oracle:
    return ask_transformers(
        folder, device, limit=LIMIT, max_tokens=16, chosen=range(0, 50, 5), kv_dtype=dtype, tie_gap=tie_gap
    )


@pytest.fixture(scope="module")
def oracle(folder: Path, device_name: str, kv_dtype: str) -> Oracle:
    return ask(folder, device_name, KV_DTYPES[kv_dtype], TIE_GAPS[kv_dtype])


@pytest.mark.parametrize("k", [0, 4])
def test_greedy_answers_are_those_of_the_rounded_cache(oracle: Oracle, device_name: str, kv_dtype: str, k: int) -> None:
    with engine_on(
        oracle.folder,
        device_name,
        max_model_len=LIMIT,
        max_num_seqs=16,
        kv_cache_dtype=kv_dtype,
        max_num_batched_tokens=48,  # prompts in parts
        speculative_config=ngram(k) if k else None,
    ) as engine:
        oracle.check(engine, random.Random(k))
        before = engine.statistics()
        assert sum(before.draft_tokens_per_position) > 0 or k == 0
        oracle.check(engine, random.Random(k + 1))
        assert engine.statistics().prefix_hit_tokens > before.prefix_hit_tokens


@pytest.fixture(scope="module")
def exact(folder: Path, device_name: str) -> Oracle:
    return ask(folder, device_name, torch.float32, 0.0)


def test_rounding_shows(oracle: Oracle, exact: Oracle) -> None:
    """Else the test above would not tell one cache from another."""
    assert [a.token_ids for a in exact.answers] != [a.token_ids for a in oracle.answers]


def test_a_narrower_cache_holds_more_and_has_a_fingerprint_of_its_own(folder: Path, device_name: str) -> None:
    def start(kv_dtype: str) -> tuple[int, bytes]:
        with engine_on(folder, device_name, kv_cache_dtype=kv_dtype) as engine:
            return _capacity(engine)

    (plain, own), (same, also_own), (half, other), (quarter, third) = (
        start(name) for name in ("auto", "float32", "bfloat16", "fp8_e4m3")
    )
    assert (plain, own) == (same, also_own)
    assert [half // plain, quarter // plain] == [2, 4]
    assert len({own, other, third}) == 3


def _capacity(engine: EngineUnderTest) -> tuple[int, bytes]:
    info = engine.core.engine.model_info
    assert info.dtype == "float32"
    return info.num_kv_blocks + 1, info.fingerprint  # and the one that is nobody's


def test_what_the_device_cannot_read_is_refused(folder: Path) -> None:
    with (
        pytest.raises(ConfigError, match="--kv-cache-dtype: the CPU keeps float32, bfloat16, fp8_e4m3 or"),
        engine_on(folder, "cpu", kv_cache_dtype="float16"),
    ):
        pass
