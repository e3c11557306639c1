"""What a caller is told of speculation, from the worker to the client."""

import time
from pathlib import Path
from typing import Any

import pytest

from clients.outputs import SpeculationStats
from server.scheduler.speculation_watch import WINDOW
from tests.fakes.served_model import SETTINGS, served_model
from tests.tiny_model import build_tiny_model

K = 3
PROMPT = [5, 6, 7] * 5
OPTIONS: dict[str, Any] = {
    "token_ids": PROMPT,
    "max_tokens": 40,
    "ignore_eos": True,
    "allowed_token_ids": [5, 6, 7],  # so that whatever is sampled repeats itself: there are drafts
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("metrics"))


def check_sums(stats: SpeculationStats, num_bins: int) -> None:
    """The identities of a summary."""
    assert len(stats.acceptance_histogram) == num_bins
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps > 0
    accepted = sum(i * count for i, count in enumerate(stats.acceptance_histogram))
    assert accepted == stats.num_accepted_draft_tokens <= stats.num_draft_tokens
    assert stats.mean_acceptance_length == pytest.approx(1 + accepted / stats.num_spec_steps)
    assert stats.draft_acceptance_rate == pytest.approx(accepted / stats.num_draft_tokens)


async def test_each_choice_tells_of_its_own_and_the_server_of_all(folder: Path) -> None:
    async with served_model(folder) as front:
        output = await front.client.generate(**OPTIONS, n=3, temperature=0.5, speculation_metrics="detailed")
        server = await front.client.stats()
    stats = [choice.finished.speculation for choice in output.choices]
    for each in stats:
        check_sums(each, num_bins=K + 1)
        assert len(each.proposed_per_step) == len(each.accepted_per_step) == each.num_spec_steps
        assert sum(each.proposed_per_step) == each.num_draft_tokens
        assert [each.accepted_per_step.count(i) for i in range(K + 1)] == list(each.acceptance_histogram)
        assert not each.is_synthetic
    assert sum(server.draft_tokens_per_position) == sum(each.num_draft_tokens for each in stats)
    assert sum(server.accepted_tokens_per_position) == sum(each.num_accepted_draft_tokens for each in stats)
    for position, accepted in enumerate(server.accepted_tokens_per_position):
        assert accepted == sum(sum(each.acceptance_histogram[position + 1 :]) for each in stats)
    drafts = sum(each.num_draft_tokens for each in stats)
    assert server.draft_acceptance_rate == pytest.approx(sum(each.num_accepted_draft_tokens for each in stats) / drafts)
    assert server.num_verify_steps <= sum(each.num_spec_steps for each in stats)


async def test_steps_are_counted_by_the_drafts_they_were_allowed(folder: Path) -> None:
    async with served_model(folder) as front:
        alone = await front.client.generate(**OPTIONS, temperature=0)
        server = await front.client.stats()
        await front.client.generate(**OPTIONS, temperature=0, speculation=False)
        assert (await front.client.stats()).steps_per_draft_limit == server.steps_per_draft_limit
    stats = alone.choices[0].finished.speculation
    assert list(server.steps_per_draft_limit) == [0] * K + [server.num_steps - 1], "the first is the prompt's"
    assert server.num_verify_steps == stats.num_spec_steps
    assert server.verify_seconds > 0


@pytest.mark.parametrize("default", ["summary", "detailed"])
async def test_the_server_s_default_holds_unless_the_request_says_otherwise(folder: Path, default: str) -> None:
    async with served_model(folder, speculation_metrics=default) as front:
        for asked in (None, "summary", "detailed"):
            output = await front.client.generate(**OPTIONS, temperature=0, speculation_metrics=asked)
            stats = output.choices[0].finished.speculation
            check_sums(stats, num_bins=K + 1)
            assert bool(stats.proposed_per_step) == ((asked or default) == "detailed")


async def test_the_histogram_is_as_wide_as_the_request_s_drafts(folder: Path) -> None:
    async with served_model(folder) as front:
        one = await front.client.generate(**OPTIONS, temperature=0, num_speculative_tokens=1)
        off = await front.client.generate(**OPTIONS, temperature=0, speculation=False)
    check_sums(one.choices[0].finished.speculation, num_bins=2)
    assert off.choices[0].finished.speculation == SpeculationStats(0, 0, 0)


async def test_what_is_synthetic_is_marked(folder: Path) -> None:
    config = {
        **_ngram(),
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0, 1.0, 0.0],
    }
    async with served_model(folder, speculative_config=config) as front:
        made_up = await front.client.generate(**OPTIONS, temperature=1.0)
        real = [
            await front.client.generate(**OPTIONS, **choice)
            for choice in ({"temperature": 0}, {"seed": 1}, {"temperature": 1.0, "speculation": False})
        ]
        assert (await front.client.model_info()).rejection_sample_method == "synthetic"
    stats = made_up.choices[0].finished.speculation
    check_sums(stats, num_bins=K + 1)
    assert stats.is_synthetic
    assert stats.acceptance_histogram[3] == 0
    assert [output.choices[0].finished.speculation.is_synthetic for output in real] == [False] * 3


def _ngram() -> dict[str, object]:
    config = SETTINGS["speculative_config"]
    assert isinstance(config, dict)
    return config


HOST = {"method": "suffix", "num_speculative_tokens": K}
DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": K, "policy": "fixed"}
LAYERS = {"method": "layer_skip", "num_layers": 1, "num_speculative_tokens": K, "policy": "fixed"}


@pytest.mark.parametrize(
    "config", [None, {**HOST, "policy": "fixed"}, LAYERS, [LAYERS, HOST]], ids=["lookup", "host", "network", "several"]
)
async def test_the_time_of_proposing_and_verifying_is_that_of_the_steps(folder: Path, config: Any) -> None:
    settings = {} if config is None else {"speculative_config": config}
    async with served_model(folder, **settings) as front:
        before_s = time.perf_counter()
        output = await front.client.generate(**OPTIONS, temperature=0)
        duration_s = time.perf_counter() - before_s
        server = await front.client.stats()
        await front.client.generate(**OPTIONS, temperature=0, speculation=False)
        after = await front.client.stats()
    stats = output.choices[0].finished.speculation
    assert server.num_verify_steps == stats.num_spec_steps > 0
    assert server.num_draft_steps >= stats.num_spec_steps, "what was verified had been proposed"
    assert 0 < server.draft_seconds < server.draft_seconds + server.verify_seconds < duration_s
    assert after.num_draft_steps == server.num_draft_steps, "nothing is proposed where nobody wants it"
    assert after.draft_seconds == server.draft_seconds


@pytest.mark.parametrize(
    ("config", "takes_in_prompts"),
    [(None, False), ({**HOST, "policy": "fixed"}, False), (LAYERS, False), (DRAFT_MODEL, True)],
)
async def test_steps_without_drafts_are_no_draft_steps(folder: Path, config: Any, takes_in_prompts: bool) -> None:
    """Only networks with K and V of their own have something to do in steps of a prompt alone."""
    settings = {} if config is None else {"speculative_config": config}
    if takes_in_prompts:
        settings = {"speculative_config": {**config, "model": str(folder)}}
    async with served_model(folder, **settings, max_num_batched_tokens=32, max_num_seqs=4) as front:
        await front.client.generate(token_ids=PROMPT * 7, max_tokens=1, ignore_eos=True)
        server = await front.client.stats()
    assert server.num_steps == 4
    assert server.num_draft_steps == (4 if takes_in_prompts else 1)
    assert sum(server.steps_per_draft_limit) == server.num_verify_steps == 0


async def test_drafts_that_do_not_pay_are_spoken_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"method": "server.commands.bench_random_drafts:RandomConfig", "num_speculative_tokens": 1}
    async with served_model(folder, speculative_config={**config, "policy": "fixed"}) as front:
        await front.client.generate(token_ids=PROMPT, max_tokens=WINDOW + 10, ignore_eos=True, temperature=0)
        server = await front.client.stats()
    assert server.draft_acceptance_rate < 0.1
    assert server.speculation_advice["low_acceptance"] == "set_policy_auto"
    assert caplog.text.count("drafts of 256 steps were accepted, less than 30%: take another method, or none, or") == 1
