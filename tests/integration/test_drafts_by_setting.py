"""Drafts change no token, whatever else is set: the cache's type, what is cached, what is fused, how the model came."""

import random
from pathlib import Path
from typing import Any

import gguf
import pytest

from server.engine.protocol import EngineStatistics
from server.request import SamplingParams
from tests.fakes.engine_under_test import engine_on
from tests.fakes.proposer_settings import build_models, config_of, with_models
from tests.fakes.reference_model import ForkCounter, Reference
from tests.fakes.scripted_proposer import ScriptedProposer
from tests.tiny_gguf import write_gguf
from tests.tiny_heads import build_tiny_eagle3
from tests.tiny_model import build_tiny_model

K = 4
DRAFTERS = ("ngram", "eagle3")
SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16 cache": {"kv_cache_dtype": "bfloat16"},
    "8-bit cache": {"kv_cache_dtype": "fp8_e4m3"},
    "no prefix caching": {"enable_prefix_caching": False},
    "batch-invariant": {"batch_invariant": True},
    "eager": {"enforce_eager": True},
    "large blocks": {"block_size": 64},
}
LONG = 8192
BLOCK_NBYTES = 2 * 2 * 2 * 16 * 4 * 16  # layers, KV heads, K and V, head size, bytes, tokens
NUM_TOKENS = 24
GREEDY, SEEDED = (
    SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("drafts_by_setting"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return build_models(tmp_path_factory.mktemp("models"))


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of which some begin alike, each greedy and seeded."""
    rng = random.Random(1)
    beginning = [rng.randrange(3, 500) for _ in range(70)]
    prompts = [beginning[: rng.randint(0, 70)] + [rng.randrange(3, 500) for _ in range(20)] for _ in range(10)]
    return prompts * 2, [GREEDY] * 10 + [SEEDED] * 10


def answers(
    model: Path, device: str, prompts: list[list[int]], params: list[SamplingParams], **settings: Any
) -> tuple[list[list[int]], EngineStatistics]:
    """The tokens of each prompt, asked for twice, and what was counted meanwhile."""
    with engine_on(model, device, max_num_seqs=16, **settings) as engine:
        first, again = (
            [outcome.only.token_ids for outcome in engine.generate(prompts, params, arrivals=random.Random(seed))]
            for seed in (0, 1)
        )
        assert again == first
        return first, engine.statistics()


@pytest.fixture(scope="module", params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(folder: Path, device_name: str, setting: str) -> list[list[int]]:
    """The tokens of that setting without drafts."""
    return answers(folder, device_name, *requests(), **SETTINGS[setting])[0]


@pytest.mark.parametrize("method", DRAFTERS)
def test_tokens_are_those_without_drafts(
    folder: Path, models: dict[str, str], device_name: str, setting: str, plain: list[list[int]], method: str
) -> None:
    config = with_models(config_of(method, K), models)
    drafted, statistics = answers(folder, device_name, *requests(), speculative_config=config, **SETTINGS[setting])
    assert drafted == plain
    assert sum(statistics.accepted_tokens_per_position) > 0


@pytest.fixture
def gguf_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model as one file; what is made of it does not stay."""
    monkeypatch.setattr("server.model.resolve.cache_root", lambda: tmp_path / "cache")
    return write_gguf(tmp_path / "tiny.gguf", folder, gguf.GGMLQuantizationType.F32)


def test_a_gguf_file_answers_as_the_folder_that_it_was_made_of(
    folder: Path, gguf_file: Path, models: dict[str, str], device_name: str
) -> None:
    expected, _ = answers(folder, device_name, *requests())
    for config in (None, with_models(config_of("ngram", K), models), with_models(config_of("eagle3", K), models)):
        found, statistics = answers(gguf_file, device_name, *requests(), speculative_config=config)
        assert found == expected
        assert (sum(statistics.accepted_tokens_per_position) > 0) == (config is not None)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("long"), max_position=LONG)


@pytest.mark.parametrize("method", ["scripted", "eagle3"])
def test_a_context_that_is_filled_to_its_last_token(
    long_model: Path, tmp_path: Path, device_name: str, method: str
) -> None:
    """One prompt that leaves room for a few tokens, and one that is a beginning of it; drafts that are mostly right,
    and those of a head with K and V of its own."""
    rng = random.Random(2)
    prompt = [rng.randrange(3, 500) for _ in range(LONG - NUM_TOKENS)]
    prompts, params = [prompt, prompt[: LONG // 2]], [GREEDY, GREEDY]
    settings: dict[str, Any] = {
        "kv_cache_memory_bytes": 3 * LONG // 16 * BLOCK_NBYTES,
        "max_num_batched_tokens": 1024,
    }
    plain, _ = answers(long_model, device_name, prompts, params, **settings)
    if method == "scripted":
        texts = [known + found for known, found in zip(prompts, plain, strict=True)]
        settings["proposer"] = ScriptedProposer(K, texts[::-1], error_rate=0.15)
    else:
        head = build_tiny_eagle3(tmp_path / "head", options={"max_position_embeddings": LONG})
        settings["speculative_config"] = {"method": "eagle3", "model": str(head), "num_speculative_tokens": K}
    drafted, statistics = answers(long_model, device_name, prompts, params, **settings)
    assert drafted == plain
    assert sum(statistics.draft_tokens_per_position) > 2 * NUM_TOKENS
    assert method != "scripted" or sum(statistics.accepted_tokens_per_position) > NUM_TOKENS
    ForkCounter().check(Reference(long_model, device_name).greedy(prompts[1], NUM_TOKENS), plain[1])
