"""The step on CUDA never waits for the device, and decodes without taking memory."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from server.composition.proposers import build_proposers
from server.plan import StepPlan
from server.request import Request, SamplingParams
from server.worker.results import StepHandle
from tests.fakes.proposer_settings import build_models, config_of, with_models
from tests.fakes.speculative import speculative_config
from tests.fakes.stepping import Stepping
from tests.tiny_model import build_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]

DEVICE = torch.device("cuda", 0)
K = 3
NUM_TOKENS = 40

MIXED = (
    SamplingParams(temperature=0, max_tokens=NUM_TOKENS),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=7, max_tokens=NUM_TOKENS),
    SamplingParams(temperature=1.1, top_p=0.8, max_tokens=NUM_TOKENS),
    SamplingParams(
        temperature=0, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, max_tokens=NUM_TOKENS
    ),
    SamplingParams(
        temperature=0.7, seed=1, logit_bias={4: 5.0}, allowed_token_ids=list(range(3, 200)), max_tokens=NUM_TOKENS
    ),
    SamplingParams(temperature=0, logprobs=4, prompt_logprobs=2, min_tokens=8, max_tokens=NUM_TOKENS),
)


def requests(params: tuple[SamplingParams, ...], num: int, *, has_bad_words: bool = False) -> list[Request]:
    """Prompts of 1 to 60 tokens, some of which repeat themselves."""
    rng = random.Random(5)
    made = []
    for number in range(num):
        piece = [rng.randrange(3, 400) for _ in range(rng.randint(1, 15))]
        made.append(
            Request(
                request_id=f"r{number}",
                prompt_token_ids=tuple(piece * rng.randint(1, 4)),
                sampling=params[number % len(params)],
                stop_token_ids=frozenset({2}),
                bad_words_token_ids=((11, 12), (13,)) if has_bad_words and number % 5 == 4 else (),
            )
        )
    return made


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("capture", [(), (1, 2, 4, 6)], ids=["eager", "captured"])
@pytest.mark.parametrize("k", [0, K])
def test_no_step_waits_for_the_device(tmp_path: Path, k: int, capture: tuple[int, ...]) -> None:
    """Prefill, mixed, decoding and verifying steps, replayed ones among them, with every kind of request."""
    stepping = Stepping(
        build_tiny_model(tmp_path), DEVICE, torch.float32, k=k, depth=1, capture=capture, max_num_seqs=6
    )
    stepping.generate(requests(MIXED, 12, has_bad_words=True))  # loads kernels and handles, which synchronises
    with no_waiting():
        tokens = stepping.generate(requests(MIXED, 18, has_bad_words=True))
    assert all(tokens)


@pytest.mark.parametrize("capture", [(), (1, 2, 4, 6)], ids=["eager", "captured"])
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa", "layer_skip"])
def test_no_network_waits_for_the_device(tmp_path: Path, method: str, capture: tuple[int, ...]) -> None:
    """What a sequence missed is caught up with, too: by turns nobody drafts."""
    given = with_models([config_of(method, K)], build_models(tmp_path / "models"))
    model = build_tiny_model(tmp_path)
    speculative = speculative_config(given)
    stepping = Stepping(
        model,
        DEVICE,
        torch.float32,
        k=K,
        depth=1,
        capture=capture,
        max_num_seqs=6,
        enable_prefix_caching=True,
        build=lambda target: build_proposers(speculative, target),
    )
    launch, numbers = stepping.runner.launch, count()

    def launched(plan: StepPlan) -> StepHandle:
        return launch(replace(plan, num_proposed=K if next(numbers) // 8 % 2 else 0))

    with patch.object(stepping.runner, "launch", launched):
        stepping.generate(requests(MIXED, 12))
        with no_waiting():
            assert all(stepping.generate(requests(MIXED, 18)))


@pytest.mark.parametrize("k", [0, K])
def test_decoding_takes_no_memory(tmp_path: Path, k: int) -> None:
    """Not even from the caching allocators, on the device or the host."""
    params = MIXED[:4]
    stepping = Stepping(build_tiny_model(tmp_path), DEVICE, torch.float32, k=k, depth=1, capture=(4,), max_num_seqs=4)
    for request in requests(params, 4):
        stepping.scheduler.add(request)
    for _ in range(4):
        stepping.step()

    def counters() -> tuple[int, ...]:
        device, host = torch.cuda.memory_stats(DEVICE), torch.cuda.host_memory_stats()
        return device["allocation.all.allocated"], device["segment.all.allocated"], host["allocations.allocated"]

    before = counters()
    for _ in range(5):
        plan = stepping.step()
        assert plan is not None
        assert all(row.num_query <= 1 + k for row in plan.rows)
    assert counters() == before
