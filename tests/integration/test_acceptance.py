"""The rules of acceptance through the whole engine."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from scipy import stats

from proposers.base import Proposer, TargetView
from proposers.draft_model import CausalNetwork
from proposers.drafting import NetworkProposer
from proposers.ngram import NgramProposer
from proposers.vocab_mapping import VocabularyMapping
from server.config import ModelConfig
from server.kernels.rejection import Method
from server.model.loader import load_model
from server.request import Request, SamplingParams
from server.scheduler.statistics import Counters
from tests.fakes.drawing_proposer import DrawingProposer
from tests.fakes.engine_under_test import engine_on, ngram
from tests.fakes.stepping import Stepping
from tests.tiny_model import build_tiny_model

NUM_REQUESTS = 1200
PROMPT = (7, 8, 9, 7, 8, 9, 7, 8)
FEW = tuple(range(20, 26))
"""The tokens that may be generated, so that each comes often enough to be counted."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("acceptance"))


def answers(
    folder: Path,
    device_name: str,
    method: Method,
    build: Callable[[TargetView], Sequence[Proposer]] | None,
) -> tuple[list[list[int]], Counters]:
    """Many unseeded answers to one prompt, and what became of the drafts."""
    stepping = Stepping(
        folder,
        torch.device(device_name),
        torch.float32,
        k=0 if build is None else 2,
        build=build,
        method=method,
        max_num_seqs=64,
    )
    sampling = SamplingParams(temperature=1.5, allowed_token_ids=FEW, max_tokens=4, ignore_eos=True)
    made = [Request(request_id=str(i), prompt_token_ids=PROMPT, sampling=sampling) for i in range(NUM_REQUESTS)]
    tokens = stepping.generate(made)
    return tokens, stepping.scheduler.counters


@pytest.fixture(scope="module")
def undrafted(folder: Path, device_name: str) -> list[list[int]]:
    """The answers without speculation."""
    return answers(folder, device_name, Method.STANDARD, None)[0]


def assert_alike(undrafted: list[list[int]], drafted: list[list[int]]) -> None:
    """The joint distributions of the first tokens."""
    for length in (1, 2, 3):  # of 6^length beginnings, those too rare for a test of their own share one
        counts = [Counter(tuple(tokens[:length]) for tokens in each) for each in (undrafted, drafted)]
        common = [key for key, count in (counts[0] + counts[1]).items() if count >= 20]
        table = [[each[key] for key in common] for each in counts]
        table = [[*row, NUM_REQUESTS - sum(row) + 1] for row in table]
        assert len(common) > 3
        assert stats.chi2_contingency(table).pvalue > 1e-4


@pytest.mark.parametrize("known", [range(18, 26), range(22, 40)], ids=["all", "some"])
@pytest.mark.parametrize("method", [Method.STANDARD, Method.BLOCK])
def test_unseeded_answers_are_distributed_as_without_speculation(
    folder: Path, device_name: str, undrafted: list[list[int]], method: Method, known: range
) -> None:
    drafted, counters = answers(folder, device_name, method, lambda _: [DrawingProposer(2, 512, known, device_name)])
    assert sum(counters.accepted) > NUM_REQUESTS / 20
    assert_alike(undrafted, drafted)


@pytest.mark.parametrize(
    ("is_in_list", "least_certainty"),
    [(False, 0.0), (True, 0.0), (False, 0.2)],
    ids=["alone", "behind ngram", "while certain"],
)
@pytest.mark.parametrize("method", [Method.STANDARD, Method.BLOCK])
def test_so_are_those_drafted_by_a_model(
    tmp_path: Path,
    folder: Path,
    device_name: str,
    undrafted: list[list[int]],
    method: Method,
    is_in_list: bool,
    least_certainty: float,
) -> None:
    """Of other weights; where a list has a lookup in front, answers mix both kinds of drafts."""
    model = build_tiny_model(tmp_path, num_layers=1, seed=9)

    def build(target: TargetView) -> list[Proposer]:
        to_target = torch.full((512,), -1)
        to_target[18:26] = torch.arange(18, 26)  # the others would seldom be kept
        mapping = VocabularyMapping(to_target, torch.arange(512))
        loaded = load_model(ModelConfig(model=str(model)), target.device, torch.float32)
        network = CausalNetwork(loaded, torch.float32, mapping, runs_plain=True)
        drawing = NetworkProposer(
            network, target, num_speculative_tokens=2, is_sampled=True, least_certainty=least_certainty
        )
        lookup = NgramProposer(2, 1, 1, takes_last=True, device=target.device)
        return [lookup, drawing] if is_in_list else [drawing]

    drafted, counters = answers(folder, device_name, method, build)
    assert sum(counters.accepted) > NUM_REQUESTS / 10
    if least_certainty:
        first, second = counters.drafted
        assert 0.1 * first < second < 0.9 * first, "some drafts end early, and some do not"
    assert_alike(undrafted, drafted)


@pytest.mark.parametrize("method", ["block", "synthetic"])
def test_greedy_and_seeded_answers_do_not_depend_on_the_rule(folder: Path, device_name: str, method: str) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(seed=4, max_tokens=30, ignore_eos=True),
    ]
    rule: dict[str, object] = {"rejection_sample_method": method}
    if method == "synthetic":
        rule["synthetic_acceptance_length"] = 3.5
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6]] * 2
    with engine_on(folder, device_name) as engine:
        expected = [outcome.only.token_ids for outcome in engine.generate(prompts, params)]
    with engine_on(folder, device_name, speculative_config=ngram(3) | rule) as engine:
        assert [outcome.only.token_ids for outcome in engine.generate(prompts, params)] == expected
        assert sum(engine.statistics().draft_tokens_per_position) > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_synthetic_rates_are_what_the_counters_say(folder: Path, device_name: str, depth: int) -> None:
    rates = [0.8, 0.5, 0.2]
    config = ngram(3) | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    sampling = SamplingParams(temperature=1, allowed_token_ids=FEW, max_tokens=100, ignore_eos=True)
    with engine_on(folder, device_name, speculative_config=config, pipeline_depth=depth) as engine:
        engine.generate([list(PROMPT)] * 32, sampling)
        statistics = engine.statistics()
    drafted = statistics.draft_tokens_per_position
    accepted = statistics.accepted_tokens_per_position
    assert drafted[0] > 500
    full = [a / drafted[0] for a in accepted]
    # Rows with fewer drafts than k, and tokens that were cut off at the end, keep fewer.
    assert rates[0] - 0.08 < full[0] < rates[0] + 0.06
    assert full == sorted(full, reverse=True)
    assert full[2] < 0.25
