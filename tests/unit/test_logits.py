"""What sampling parameters do to logits, against an implementation too simple to be wrong."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import InvalidRequest
from server.kernels.reference import restrict
from server.plan import SequenceStart
from server.request import SamplingParams
from server.worker.logits import LogitsProcessor
from server.worker.transfer import Transfer
from tests.fakes.worker_state import batch_of, decode_row, inputs_of, put_drafts, start

VOCAB = 12


def slow_process(
    logits: Sequence[float], request: SequenceStart, known: Sequence[int], stop_ids: Sequence[int]
) -> list[float]:
    """The logits of the token after `known`, one rule after the other."""
    sampling, num_prompt = request.request.sampling, request.num_prompt
    prompt, output = known[:num_prompt], list(known[num_prompt:])
    result = list(logits)
    for token in range(len(result)):
        if sampling.allowed_token_ids is not None and token not in sampling.allowed_token_ids:
            result[token] = -math.inf
        result[token] += sampling.logit_bias.get(token, 0.0)
        if token in stop_ids and len(output) < sampling.min_tokens:
            result[token] = -math.inf
        for word in request.request.bad_words_token_ids:
            beginning = list(word[:-1])
            if token == word[-1] and output[len(output) - len(beginning) :] == beginning:
                result[token] = -math.inf
        count = output.count(token)
        if token in prompt or count:
            factor = sampling.repetition_penalty
            result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
        result[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    return result


def slow_restrict(logits: Sequence[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that may be chosen."""
    highest = max(logits)
    kept = {token for token, logit in enumerate(logits) if logit >= highest + (math.log(min_p) if min_p else -math.inf)}
    if top_k > 0:
        ordered = sorted((logits[token] for token in kept), reverse=True)
        kept = {token for token in kept if logits[token] >= ordered[min(top_k, len(ordered)) - 1]}
    total = sum(math.exp(logits[token] - highest) for token in kept)
    mass, nucleus, edge = 0.0, set(), math.inf
    for token in sorted(kept, key=lambda token: -logits[token]):
        if mass >= top_p and logits[token] < edge:
            break
        nucleus.add(token)
        edge = logits[token]
        mass += math.exp(logits[token] - highest) / total
    return nucleus if top_p < 1 else kept


def random_params(rng: random.Random) -> SamplingParams:
    """Some of the rules, at random."""

    def ids(most: int) -> list[int]:
        return rng.sample(range(VOCAB), rng.randint(1, most))

    return SamplingParams(
        repetition_penalty=rng.choice([1.0, 0.5, 1.7]),
        frequency_penalty=rng.choice([0.0, 0.7, -1.5]),
        presence_penalty=rng.choice([0.0, 1.1, -0.4]),
        logit_bias={token: rng.uniform(-5, 5) for token in ids(3)} if rng.random() < 0.5 else {},
        allowed_token_ids=[*ids(8)] if rng.random() < 0.3 else None,
        min_tokens=rng.choice([0, 3, 6]),
        max_tokens=16,
    )


@pytest.mark.parametrize("seed", range(12))
def test_every_position_is_processed_with_the_context_it_has(device_name: str, seed: int) -> None:
    rng = random.Random(seed)
    starts, drafts, stops = [], [], []
    for slot in range(6):
        num_prompt = rng.randint(1, 6)
        tokens = [rng.randrange(VOCAB) for _ in range(num_prompt + rng.randint(0, 7))]
        stop_ids = rng.sample(range(VOCAB), 2)
        starts.append(
            start(
                slot,
                tokens,
                num_prompt=num_prompt,
                sampling=random_params(rng),
                stop_token_ids=stop_ids,
                bad_words=[[rng.randrange(3) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(0, 4))],
            )
        )
        stops.append(stop_ids)
        drafts.append([rng.randrange(3) for _ in range(rng.randint(0, 4))])
    batch = batch_of(starts, device_name)
    processor = LogitsProcessor(batch, VOCAB, Transfer(torch.device(device_name)))
    for item, draft in zip(starts, drafts, strict=True):
        processor.start(item.slot, item.request)
        put_drafts(batch, item.slot, draft)
    rows = [decode_row(item.slot, len(item.token_ids), len(d)) for item, d in zip(starts, drafts, strict=True)]
    sampling = inputs_of(rows, starts, device_name).sampling
    assert sampling is not None
    raw = torch.randn(len(rows), sampling.num_positions, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits = raw.clone().to(device_name)
    assert processor.apply(logits, sampling) == {}
    for i, row in enumerate(sampling.rows):
        item = starts[row.slot]
        for position in range(len(drafts[row.slot]) + 1):
            known = [*item.token_ids, *drafts[row.slot][:position]]
            expected = slow_process(raw[i, position].tolist(), item, known, stops[row.slot])
            torch.testing.assert_close(logits[i, position].cpu(), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_an_exception_in_one_row_s_rules_leaves_the_others_alone(device_name: str) -> None:
    params = SamplingParams(logit_bias={1: 2.0})
    starts = [start(slot, [1, 2], sampling=params) for slot in range(3)]
    batch = batch_of(starts, device_name)
    processor = LogitsProcessor(batch, VOCAB, Transfer(torch.device(device_name)))
    for item in starts:
        processor.start(item.slot, item.request)
    object.__setattr__(processor._rules[1], "bias", torch.zeros(VOCAB + 1, device=device_name))
    sampling = inputs_of([decode_row(slot, 2, 0) for slot in range(3)], starts, device_name).sampling
    assert sampling is not None
    logits = torch.zeros(3, 1, VOCAB, device=device_name)
    failed = processor.apply(logits, sampling)
    assert list(failed) == [1]
    assert "logits processing failed" in failed[1]
    assert logits[0, 0, 1] == logits[2, 0, 1] == 2


finite = st.floats(-30, 30, width=32)


@settings(max_examples=200)
@given(
    logits=st.lists(st.one_of(finite, st.sampled_from([0.0, 1.0, -1.0])), min_size=2, max_size=10),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 1000, 2**62]),
    top_p=st.sampled_from([1e-9, 0.3, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
    temperature=st.sampled_from([1e-4, 0.7, 1.0, 1e38]),
)
def test_restrict_keeps_what_the_slow_one_keeps(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    scaled = torch.tensor(logits) / temperature
    kept = restrict(scaled.clone()[None, None], torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))[
        0, 0
    ]
    expected = slow_restrict(scaled.tolist(), top_k, top_p, min_p)
    # Sums at the very edge of top_p may round to either side.
    if expected != (got := {token for token, logit in enumerate(kept.tolist()) if logit > -math.inf}):
        around = [slow_restrict(scaled.tolist(), top_k, top_p * (1 + shift), min_p) for shift in (-1e-5, 1e-5)]
        assert got in around or top_p == 1
    assert all(kept[token] == scaled[token] for token in got)
    assert int(scaled.argmax()) in got


def test_a_row_that_keeps_all_is_not_cut_by_a_neighbour_s_top_p(device_name: str) -> None:
    """Rounding takes the cumulative sum to 1 long before the tail of a peaked distribution."""
    logits = torch.linspace(20, -20, 4096, device=device_name).expand(2, 1, -1).clone()
    kept = restrict(logits, None, torch.tensor([1.0, 0.9], device=device_name), None)
    assert torch.isfinite(kept[0]).all()
    assert torch.isfinite(kept[1]).sum() < 4096


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_row_without_any_choice_does_not_break_the_step(device_name: str, value: float) -> None:
    logits = torch.zeros(2, 1, VOCAB, device=device_name)
    logits[0] = value
    top_p = torch.tensor([0.5, 0.5], device=device_name)
    top_k = torch.tensor([3, 3], device=device_name)
    kept = restrict(logits, top_k, top_p, torch.tensor([0.1, 0.1], device=device_name))
    assert torch.isfinite(kept[1]).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 1e39), ("top_k", 2**63), ("repetition_penalty", 1e39), ("repetition_penalty", 1e-40)],
)
def test_what_the_device_cannot_hold_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: value})
