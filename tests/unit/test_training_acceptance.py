"""Acceptance: chances over texts, and the walk through them."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from proposers.base import TargetModel
from proposers.training.acceptance import Drafter, walk
from proposers.training.end_to_end import count
from proposers.training.measures import Line, Measures, Tally, table
from proposers.training.medusa_trainee import MedusaTrainee
from proposers.training.packing import pack
from proposers.training.prompt_file import PromptRecord
from proposers.training.target import TargetFeatures, Wanted
from proposers.training.teacher_forced import HeldOut, measure
from server.engine.protocol import SpeculationStats
from server.llm import CompletionOutput
from tests.fakes.training import TAPS, VOCAB, random_eagle, random_texts, tiny_target

TEMPERATURE, K = 0.8, 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, device_name: str) -> TargetModel:
    return tiny_target(tmp_path_factory.mktemp("target"), device_name)


def walked(kept: list[list[int]], first: int, k: int) -> Tally:
    tally = Tally(k)
    walk(np.array(kept, dtype=bool), first, tally)
    return tally


def test_a_walk_goes_on_behind_the_first_draft_that_is_refused() -> None:
    kept = [
        [1, 1, 0, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 0, 1, 1],
    ]
    tally = walked(kept, 1, 2)
    # From 1: draft for 1 kept, for 2 kept as second: on to 4. From 4: kept, refused: on to 6, too near the end.
    assert (tally.num_steps, tally.num_tokens, tally.kept) == (2, 5, [2, 1])
    assert (tally.mean_length, tally.acceptance) == (2.5, [1.0, 0.5])
    one = walked(kept, 1, 1)
    assert (one.num_steps, one.mean_length) == (3, 2.0)
    assert walked(kept, 7, 2).mean_length == 0
    assert walked([[0] * 8] * 2, 0, 2).mean_length == 1


@torch.no_grad()
def test_chances_are_those_of_the_head_s_own_distributions(target: TargetModel) -> None:
    device = target.model.device
    to_target = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:400]
    trainee = random_eagle(target, to_target)
    (text,) = random_texts((20,))
    rows, _ = pack([text], 24)
    rows = rows.to(device)
    features = TargetFeatures(target, Wanted(TAPS, TEMPERATURE)).compute(rows)
    chances = Drafter(trainee, VOCAB, TEMPERATURE).chances(rows, features, K)
    logits = target.model(input_ids=rows.token_ids[:, :20], use_cache=False).logits[0]
    own = [trainee.logits(made)[0] for made in trainee.unroll(rows, features, K)]
    ids = to_target.tolist()
    for index in range(K):
        for place in range(index + 2, 20):
            token = int(text.token_ids[place])
            p = float((logits[place - 1] / TEMPERATURE).softmax(-1)[token])
            here = own[index][place - 1]
            q = float((here / TEMPERATURE).softmax(-1)[ids.index(token)]) if token in ids else 0.0
            assert chances.kept[index, 0, place] == pytest.approx(min(1, q / p), rel=1e-3, abs=1e-5)
            assert chances.is_likeliest[index, 0, place] == (ids[int(here.argmax())] == token)
        assert not chances.kept[index, 0, : index + 2].any(), "there is nothing to draft from yet"


@torch.no_grad()
def test_medusa_s_heads_foretell_one_token_each(target: TargetModel) -> None:
    trainee = MedusaTrainee(target, torch.arange(VOCAB), K)
    random = torch.Generator().manual_seed(0)
    for parameter in trainee.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.5)
    (text,) = random_texts((16,))
    rows, _ = pack([text], 16)
    rows = rows.to(target.model.device)
    features = TargetFeatures(target, Wanted((), TEMPERATURE)).compute(rows)
    chances = Drafter(trainee, VOCAB, TEMPERATURE).chances(rows, features, K)
    hidden = target.model.base_model(input_ids=rows.token_ids, use_cache=False).last_hidden_state[0]
    for index, block in enumerate(trainee.blocks):
        foretold = target.head.logits(hidden + functional.silu(block(hidden))).argmax(-1).tolist()
        for place in range(index + 2, 16):
            # The draft `index` behind known tokens up to place - index - 1, by the hidden state in front of the last.
            assert chances.is_likeliest[index, 0, place] == (foretold[place - index - 2] == text.token_ids[place])


def test_measures_are_a_table_with_a_line_for_each_series() -> None:
    measures = Measures()
    for k, lengths in ((2, (0, 2, 1)), (4, (0, 4, 1))):
        tally = measures.of(Line("teacher-forced", "eagle3", "heldout", "chat", 0.0, "greedy", False, k))
        tally.num_texts = 7
        for num_kept in lengths:
            tally.add(num_kept)
    entries = measures.entries()
    assert [entry["mean_length"] for entry in entries] == [2.0, 2.6667]
    assert entries[0]["acceptance"] == [0.6667, 0.3333]
    heading, line = table(entries).splitlines()
    assert heading.split()[:3] == ["how", "method", "prompts"]
    assert line.split()[-6:] == ["2.000", "2.667", "0.667", "0.333", "0.333", "0.333"]


def test_texts_that_repeat_themselves_are_left_out_and_counted(target: TargetModel) -> None:
    varied, same = random_texts((60, 60), split="heldout")
    same.token_ids[3:] = 7
    trainee = random_eagle(target, torch.arange(VOCAB))
    measures = measure(
        HeldOut([varied, same], (2,), row_length=64),
        Drafter(trainee, VOCAB, TEMPERATURE),
        TargetFeatures(target, Wanted(TAPS, TEMPERATURE)),
        target.model.device,
        "eagle3",
    )
    counts = {entry["is_low_repetition"]: entry["num_texts"] for entry in measures.entries() if entry["kind"] == "chat"}
    assert counts == {False: 2, True: 1}


def test_steps_of_an_engine_count_with_and_without_drafts() -> None:
    prompt = PromptRecord("code", "x", "handwritten", ("def f",))
    speculation = SpeculationStats(
        num_spec_steps=3, num_draft_tokens=6, num_accepted_draft_tokens=3, acceptance_histogram=(1, 1, 1)
    )
    # The first token, 3 steps that brought 1, 2 and 3, and two without drafts.
    output = CompletionOutput(0, token_ids=list(range(9)), speculation=speculation)
    measures = Measures()
    count(measures, "ngram", prompt, output, 0.8, 2)
    by_kind = {entry["kind"]: entry for entry in measures.entries() if not entry["is_low_repetition"]}
    assert set(by_kind) == {"code", "all"}
    assert by_kind["code"]["num_steps"] == 5
    assert by_kind["code"]["mean_length"] == 8 / 5
    assert by_kind["code"]["acceptance"] == [2 / 5, 1 / 5]
