"""Prompt lookup, against an implementation in plain lists."""

import random
from collections.abc import Sequence

import pytest
import torch

from proposers.base import Draft, ProposeInput
from proposers.ngram import NgramConfig, NgramProposer


def slow_lookup(text: Sequence[int], k: int, shortest: int, longest: int, *, takes_last: bool, most: int) -> list[int]:
    """What followed the longest run of last tokens at its first or last earlier occurrence."""
    for window in range(min(longest, len(text) - 1), shortest - 1, -1):
        run = list(text[len(text) - window :])
        places = [i for i in range(len(text) - window) if list(text[i : i + window]) == run]
        if places:
            after = (places[-1] if takes_last else places[0]) + window
            return list(text[after : after + min(k, most)])
    return []


def lookup(k: int, shortest: int, longest: int, device: str, *, takes_last: bool = False) -> NgramProposer:
    return NgramProposer(k, shortest, longest, takes_last=takes_last, device=torch.device(device))


def propose(
    texts: Sequence[Sequence[int]], proposer: NgramProposer, device: str, max_drafts: Sequence[int] | None = None
) -> Draft:
    """Drafts for texts that lie in shuffled slots, with leftovers of earlier sequences behind them."""
    num_slots, longest = len(texts) + 2, max(map(len, texts))
    rng = random.Random(len(texts))
    token_ids = torch.tensor([[rng.randrange(3) for _ in range(longest + 40)] for _ in range(num_slots)])
    slots = rng.sample(range(num_slots), len(texts))
    for slot, text in zip(slots, texts, strict=True):
        token_ids[slot, : len(text)] = torch.tensor(text)
    return proposer.propose(
        ProposeInput(
            token_ids=token_ids.int().to(device),
            slots=torch.tensor(slots, device=device),
            num_tokens=torch.tensor([len(text) for text in texts], device=device),
            max_drafts=torch.tensor(max_drafts or [99] * len(texts), dtype=torch.int32, device=device),
            max_num_tokens=longest + rng.randrange(2),
        )
    )


def as_lists(draft: Draft) -> list[list[int]]:
    """The drafts without their padding, which must be -1."""
    lists = []
    for ids, count in zip(draft.ids.tolist(), draft.counts.tolist(), strict=True):
        assert ids[count:] == [-1] * (len(ids) - count)
        lists.append(ids[:count])
    return lists


@pytest.mark.parametrize("takes_last", [False, True])
@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 5), (3, 3), (4, 64)])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_equals_the_slow_lookup_on_random_texts(
    device_name: str, k: int, shortest: int, longest: int, takes_last: bool
) -> None:
    rng = random.Random(k * 100 + longest)
    texts = [[rng.randrange(1 + i % 4) for _ in range(rng.randint(1, 40))] for i in range(60)]
    most = [rng.randint(0, k) for _ in texts]
    draft = propose(texts, lookup(k, shortest, longest, device_name, takes_last=takes_last), device_name, most)
    assert draft.ids.shape == (60, k)
    assert draft.ids.dtype == draft.counts.dtype == torch.int32
    assert draft.logits is None
    expected = [
        slow_lookup(text, k, shortest, longest, takes_last=takes_last, most=m)
        for text, m in zip(texts, most, strict=True)
    ]
    assert as_lists(draft) == expected
    assert any(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], [9, 1, 2]),  # the first of two occurrences
        ([4, 1, 2, 9, 1, 2, 7, 4, 1, 2], [9, 1, 2]),  # the longer run goes first
        ([1, 2], []),  # shorter than the window
        ([5], []),
        ([1, 2, 3, 4], []),  # nothing repeats
        ([6, 6, 6], [6]),  # the occurrence overlaps the end: what follows is cut there
        ([7, 8, 7, 8], [7, 8]),
    ],
)
def test_examples(device_name: str, text: list[int], expected: list[int]) -> None:
    assert as_lists(propose([text], lookup(3, 2, 3, device_name), device_name)) == [expected]


def test_the_last_occurrence_as_an_option(device_name: str) -> None:
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3]
    assert as_lists(propose([text], lookup(3, 2, 3, device_name, takes_last=True), device_name)) == [[8, 1, 2]]


def test_other_parameters_from_the_next_draft_on(device_name: str) -> None:
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3]
    proposer = lookup(3, 2, 3, device_name)
    for change, expected in (({"match": "last"}, [8, 1, 2]), ({"prompt_lookup_min": 4}, []), ({}, [9, 1, 2])):
        values = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, **change}
        proposer.reconfigure(NgramConfig.model_validate(values))
        assert as_lists(propose([text], proposer, device_name)) == [expected]
