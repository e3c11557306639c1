"""Draft models whose tokens have other ids, or are other ones: the answers are those without them."""

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from transformers import AutoModelForCausalLM

from server.errors import ConfigError, ModelError
from server.request import SamplingParams
from tests.fakes.engine_under_test import EngineUnderTest, engine_on
from tests.fakes.tokenizers import sentencepiece_tokenizer
from tests.fakes.twin_model import build_twin
from tests.tiny_model import build_tiny_model

VOCAB_SIZE = 441
"""What the tiny model's tokenizer has: the target has no rows without a token."""
NUM_REQUESTS = 1000
SHORT = [7, 8, 9, 7, 8]
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("target"), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """The target, its ids shuffled."""
    return build_twin(tmp_path_factory.mktemp("drafts") / "twin", target)


@pytest.fixture(scope="module")
def relative(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """Much like the target, but every ninth token is another one."""
    return build_twin(
        tmp_path_factory.mktemp("drafts") / "relative", target, foreign=tuple(range(5, VOCAB_SIZE, 9)), noise=0.02
    )


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tokenizer, another model, fewer tokens."""
    folder = build_tiny_model(tmp_path_factory.mktemp("stranger"), vocab_size=320, seed=5)
    pieces = [f"{SPACE}the", f"{SPACE}dog", "ing", *"abcdefghijklmnopqrstuvwxyz", SPACE]
    tokenizer: Any = sentencepiece_tokenizer(pieces, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    return folder


def drafting(model: Path, k: int = 3, **settings: object) -> dict[str, Any]:
    base: dict[str, object] = {"method": "draft_model", "model": str(model), "num_speculative_tokens": k}
    return {"speculative_config": {**base, "use_heterogeneous_vocab": True, **settings}}


def answers(engine: EngineUnderTest) -> list[list[int]]:
    """Greedy and seeded ones."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 5, 16, 40, 64, 90)]
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, temperature=temperature, seed=seed)
        for seed in (3, 4, 5)
        for temperature in (0, 0.8)
    ]
    return [outcome.only.token_ids for outcome in engine.generate(prompts, params)]


@pytest.fixture(scope="module")
def expected(target: Path, device_name: str) -> list[list[int]]:
    with engine_on(target, device_name) as engine:
        return answers(engine)


def acceptance(engine: EngineUnderTest) -> float:
    statistics = engine.statistics()
    assert sum(statistics.draft_tokens_per_position) > 0
    return sum(statistics.accepted_tokens_per_position) / sum(statistics.draft_tokens_per_position)


@pytest.mark.parametrize("budget", [2048, 24], ids=["whole prompts", "chunks"])
def test_the_same_model_in_other_words_is_right_each_time(
    target: Path, twin: Path, device_name: str, expected: list[list[int]], budget: int
) -> None:
    limits: dict[str, Any] = {"max_num_batched_tokens": budget, "max_num_seqs": 8}
    with engine_on(target, device_name, **drafting(twin), **limits) as engine:
        assert answers(engine) == expected
        assert acceptance(engine) > 0.95  # drafts beyond the last token that was asked for are not kept


@pytest.mark.parametrize("settings", [{}, {"draft_sample_method": "greedy"}, {"kv_cache_dtype": "fp8_e4m3"}], ids=str)
def test_a_model_with_tokens_of_its_own_is_right_at_times(
    target: Path, relative: Path, device_name: str, expected: list[list[int]], settings: dict[str, Any]
) -> None:
    with engine_on(target, device_name, **drafting(relative, **settings)) as engine:
        assert answers(engine) == expected
        assert 0.1 < acceptance(engine) < 0.9


def test_another_tokenizer(target: Path, stranger: Path, device_name: str, expected: list[list[int]]) -> None:
    with engine_on(target, device_name, **drafting(stranger)) as engine:
        assert answers(engine) == expected
        assert acceptance(engine) < 0.1


def unseeded(target: Path, device_name: str, **settings: Any) -> tuple[list[list[int]], float]:
    params = SamplingParams(temperature=0.35, max_tokens=4, ignore_eos=True)
    with engine_on(target, device_name, max_num_seqs=64, **settings) as engine:
        outcomes = engine.generate([SHORT] * NUM_REQUESTS, params)
        return [outcome.only.token_ids for outcome in outcomes], acceptance(engine) if settings else 0.0


@pytest.fixture(scope="module")
def undrafted(target: Path, device_name: str) -> list[list[int]]:
    return unseeded(target, device_name)[0]


@pytest.mark.parametrize("method", ["standard", "block"])
def test_unseeded_answers_are_distributed_as_without_drafts(
    target: Path, relative: Path, device_name: str, undrafted: list[list[int]], method: str
) -> None:
    drafted, accepted = unseeded(target, device_name, **drafting(relative, k=2, rejection_sample_method=method))
    assert 0.1 < accepted < 0.9
    for length in (1, 2, 3):
        counts = [Counter(tuple(tokens[:length]) for tokens in each) for each in (undrafted, drafted)]
        common = [key for key, count in (counts[0] + counts[1]).items() if count >= 20]
        table = [[each[key] for key in common] for each in counts]
        table = [[*row, NUM_REQUESTS - sum(row) + 1] for row in table]
        assert len(common) > 3
        assert stats.chi2_contingency(table).pvalue > 1e-4


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("twin", r"token 3 is '.*' for the target and '.*' for the draft.*set use_heterogeneous"),
        ("stranger", r"\(of 320, .*\) than the target \(of 441, .*\): token 0 is '<\|endoftext\|>' for"),
    ],
)
def test_another_vocabulary_is_refused_unless_asked_for(
    request: pytest.FixtureRequest, target: Path, device_name: str, model: str, message: str
) -> None:
    config = drafting(request.getfixturevalue(model), use_heterogeneous_vocab=False)
    with pytest.raises(ConfigError, match=message), engine_on(target, device_name, **config):
        pass


def test_a_draft_model_that_is_not_there_is_called_one(target: Path, tmp_path: Path, device_name: str) -> None:
    config = drafting(tmp_path / "none", use_heterogeneous_vocab=False)
    with (
        pytest.raises(ModelError, match=r"^speculative_config.model: there is no folder or file .*none"),
        engine_on(target, device_name, **config),
    ):
        pass


@pytest.mark.parametrize("is_target_longer", [True, False])
def test_rows_without_a_token_make_no_other_vocabulary(
    target: Path, tmp_path: Path, device_name: str, is_target_longer: bool
) -> None:
    """Models of one family pad their vocabularies to sizes of their own."""
    padded = tmp_path / "padded"
    shutil.copytree(target, padded)
    model = AutoModelForCausalLM.from_pretrained(target)
    model.resize_token_embeddings(VOCAB_SIZE + 60, mean_resizing=False)
    model.save_pretrained(padded)
    served, draft = (padded, target) if is_target_longer else (target, padded)
    with engine_on(served, device_name) as engine:
        undrafted = answers(engine)
    with engine_on(served, device_name, **drafting(draft, use_heterogeneous_vocab=False)) as engine:
        assert answers(engine) == undrafted
        assert acceptance(engine) > 0.8
