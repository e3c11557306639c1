"""No request waits for a compiler."""

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from server.guidance.params import StructuredOutputsParams
from server.request import SamplingParams
from tests.fakes.engine_under_test import engine_on, ngram
from tests.gpu.test_step import MIXED
from tests.tiny_model import build_tiny_model

GUIDED = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z ]{9,}"), max_tokens=20)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_eager", [True, False])
def test_every_kernel_is_loaded_before_the_first_request(tmp_path: Path, is_eager: bool) -> None:
    """Prompts of many lengths, chunks, drafts, every sampling parameter, batches of all sizes, crowds of short ones."""
    from triton import knobs

    rng = random.Random(3)
    prompts = [[rng.randrange(3, 90) for _ in range(rng.randint(1, 30))] * rng.randint(1, 14) for _ in range(40)]
    short = [[rng.randrange(3, 90) for _ in range(rng.randint(2, 16))] for _ in range(96)]
    compiled: list[str] = []

    def note(**event: Any) -> None:
        compiled.append(f"{event['fn'].name}: {event['compile']['signature']}, {event['compile']['constants']}")

    with (
        engine_on(
            build_tiny_model(tmp_path),
            "cuda",
            enforce_eager=is_eager,
            speculative_config=ngram(3),
            max_num_seqs=48,
            max_num_batched_tokens=512,
            max_num_partial_prefills=48,
            kv_cache_memory_bytes=16 << 20,
        ) as engine,
        patch.object(knobs.runtime, "jit_post_compile_hook", note),
    ):
        for wave in (prompts[:12], prompts, short):
            params = [MIXED[i % len(MIXED)] for i in range(len(wave))]
            params[::5] = [GUIDED] * len(params[::5])
            outcomes = engine.generate(wave, params, arrivals=None if wave is short else rng)
            assert all(outcome.error is None for outcome in outcomes)
    assert compiled == []


def test_most_of_attention_is_compiled_in_a_rehearsal(tmp_path: Path) -> None:
    from triton import knobs

    was_rehearsed: list[bool] = []

    def note(**event: Any) -> None:
        if "attention_kernel" in event["repr"]:
            was_rehearsed.append(event["is_manual_warmup"])

    settings: dict[str, Any] = {"block_size": 48, "max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20}
    with (
        patch.object(knobs.runtime, "jit_post_compile_hook", note),
        engine_on(build_tiny_model(tmp_path), "cuda", **settings),
    ):
        pass
    assert sum(was_rehearsed) > len(was_rehearsed) / 2, "no other test has blocks of this size"
