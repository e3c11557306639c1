"""The parts of `outrider bench speculation`."""

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from proposers.base import ProposeInput, TargetView
from server.commands.bench_engine_rounds import Round
from server.commands.bench_random_drafts import RandomConfig
from server.commands.bench_speculation_prompts import PROMPTS
from server.commands.bench_speculation_report import cell_line, cell_report, heading, phase_report, verdict
from server.commands.bench_speculation_rounds import AUTO, OFF, Candidate, Measured, candidates, rotated
from server.commands.bench_speculation_steps import StepLog
from server.events import StepFinished
from server.preprocess import Preprocessor, TextPrompt
from tests.fakes.core import Clock

TWO = Candidate(2)


def measured(decode_s: float, *, num_drafts: int = 0, num_accepted: int = 0) -> Measured:
    """A round of 2 sequences with 10 tokens each after the first."""
    measured_round = Round(0.1, decode_s, 10, 22, num_drafts, num_accepted, num_draft_rows=num_drafts // 2)
    return Measured(measured_round, draft_s=decode_s / 4, num_drafts_chosen=num_drafts, num_steps=10)


def cell() -> dict[str, Any]:
    return cell_report(
        "text",
        2,
        {
            OFF: [measured(2.0), measured(4.0), measured(2.0)],
            TWO: [measured(each, num_drafts=20, num_accepted=10) for each in (1.0, 2.0, 1.0)],
            AUTO: [measured(each, num_drafts=10, num_accepted=9) for each in (1.0, 2.5, 1.0)],
        },
    )


def test_a_cell_compares_turn_by_turn() -> None:
    report = cell()
    assert [each["tokens_per_s"]["median"] for each in report["candidates"]] == [10.0, 20.0, 20.0]
    assert report["best_fixed"] == 2
    assert report["auto_per_off"]["all"] == pytest.approx([2.0, 1.6, 2.0]), "the slow turn was slow for all"
    assert report["auto_per_best"]["all"] == pytest.approx([1.0, 0.8, 1.0])
    off, two, _ = report["candidates"]
    assert (off["acceptance_rate"], off["mean_acceptance_length"]) == (None, None)
    assert (two["acceptance_rate"], two["mean_acceptance_length"], two["mean_drafts_chosen"]) == (0.5, 2.0, 2.0)
    assert two["step_ms"]["median"] == 100.0
    assert two["draft_time_share"] == pytest.approx(1.0 / (3 * 0.1 + 4.0)), "prompts have their share of both"


def test_lines_have_the_columns_of_the_heading() -> None:
    columns = heading([candidate.name for candidate in (OFF, TWO, AUTO)])
    line = cell_line(cell())
    assert len(columns) == len(line)
    assert line.split() == [
        *("text", "2", "10.0", "20.0", "20.0", "k=2", "2.00", "(1.60-2.00)", "1.00", "(0.80-1.00)", "1.0"),
        *("0.50", "2.00"),
    ]
    phase = phase_report("random", 1, {OFF: [10.0], TWO: [5.0], AUTO: [9.0]})
    assert len(cell_line(phase)) == len(columns)
    assert list(verdict([cell(), phase], "cells")) == [
        "cells, auto/off >= 0.98: 1 of 2; not random x 1 (0.900)",
        "cells, auto/best >= 0.95: 1 of 2; not random x 1 (0.900)",
    ]


def test_off_and_auto_are_always_among_the_candidates_and_none_is_beyond_the_proposer() -> None:
    assert [each.name for each in candidates((2, 8, 1, 5), 4)] == ["0", "1", "2", "4", "auto"]


def test_every_candidate_is_first_once() -> None:
    listed = [OFF, TWO, AUTO]
    assert [rotated(listed, turn)[0] for turn in range(4)] == [OFF, TWO, AUTO, OFF]
    assert all(set(rotated(listed, turn)) == set(listed) for turn in range(4))


async def test_only_steps_of_the_whole_batch_count() -> None:
    clock = Clock()
    log = StepLog(clock)
    reached = log.expect(batch=2, num_steps=3)
    for duration_s, num_rows, num_tokens in ((9.0, 2, 1), (9.0, 1, 2), (1.0, 2, 2), (0.5, 2, 4), (0.5, 2, 6)):
        assert not reached.done()
        clock.now_s += duration_s
        log(StepFinished(duration_s, num_rows, 4, num_tokens, 0.0))
    await asyncio.wait_for(reached, 30)
    clock.now_s += 1.0
    log(StepFinished(1.0, 2, 4, 2, 0.0))
    assert log.tokens_per_s(1) == (4 + 6) / 1.0


async def test_nobody_may_wait_for_the_steps() -> None:
    log = StepLog(Clock())
    reached = log.expect(batch=1, num_steps=1)
    reached.cancel()
    log(StepFinished(1.0, 1, 1, 1, 0.0))
    await asyncio.sleep(0)
    assert reached.cancelled()


class _Letters:
    """A tokenizer of characters in the place of a Preprocessor."""

    model_info = SimpleNamespace(vocab_size=256)

    def tokenize(self, prompt: TextPrompt) -> list[int]:
        return list(prompt.text.encode("ascii", "replace"))


@pytest.mark.parametrize("workload", PROMPTS)
def test_prompts_are_as_long_as_asked_and_the_same_for_the_same_seed(workload: str) -> None:
    def first(seed: int) -> list[tuple[int, ...] | None]:
        source = PROMPTS[workload](cast(Preprocessor, _Letters()), input_len=40, output_len=7, seed=seed)
        prompts = list(itertools.islice(source, 20))
        assert all(prompt.max_tokens == 7 and len(prompt.token_ids or ()) == 40 for prompt in prompts)
        return [prompt.token_ids for prompt in prompts]

    assert first(1) == first(1) != first(2)
    assert len(set(first(1))) > 15
    repeats = [ids is not None and ids[:16] == ids[16:32] for ids in first(1)]
    assert all(repeats) if workload == "repeat" else not any(repeats)


def test_random_drafts_are_as_many_as_allowed_and_differ_from_step_to_step() -> None:
    proposer = RandomConfig(method="random", num_speculative_tokens=3).build(TargetView(50, torch.device("cpu"), 2))
    token_ids = torch.arange(40, dtype=torch.int32).view(2, 20)

    def draft(num_tokens: int) -> list[list[int]]:
        lengths = torch.tensor([num_tokens, num_tokens])
        max_drafts = torch.tensor([3, 1], dtype=torch.int32)
        found = proposer.propose(ProposeInput(token_ids, torch.tensor([0, 1]), lengths, max_drafts, 20))
        assert found.counts.tolist() == [3, 1]
        assert found.ids.dtype == found.counts.dtype == torch.int32
        rows: list[list[int]] = found.ids.tolist()
        return rows

    drafts = [draft(num_tokens) for num_tokens in range(1, 19)]
    assert all(second[1:] == [-1, -1] for _, second in drafts)
    tokens = [token for first, second in drafts for token in (*first, second[0])]
    assert all(0 <= token < 50 for token in tokens)
    assert len(set(tokens)) > 25, "of 72 draws"
